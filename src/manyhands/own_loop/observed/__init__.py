"""The observed loop: a script for one process, unchanged, on many workers (`manyhands run --auto`).

In the order of reading: `loops` (pure: which line feeds a backward, and how its batches are dealt), `loss_scale` (pure: a
mean or a sum over rows), `probe` (how workers find it), `modules` (which modules an optimizer steps), `drift` (whether
models stay equal), `loop` (the script's own loop), `hooks` (what is replaced in torch) and `script` (what a script is, and
what runs it). Used by the command, by way of `own_loop.launch`.
"""
