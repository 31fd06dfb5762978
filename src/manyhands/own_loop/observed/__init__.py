"""The observed loop: a script for one process, unchanged, on many workers (`manyhands run --auto`).

In the order of reading: `loops` (pure: which line feeds a backward, and how its batches are dealt), `loss_scale` (pure: a
mean or a sum over rows), `hooks` (what watches the script), `modules` (which modules an optimizer steps), `script` (what
a script is, and what is refused), `rehearsal` (several workers against one). Used by `own_loop.launch`.
"""
