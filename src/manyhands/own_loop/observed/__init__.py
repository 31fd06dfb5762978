"""A script for one process, unchanged, on many workers (`manyhands run --auto`).

`script` says what a script is, and what runs it: `own_loop.whole` where every worker sees whole batches, `sliced_script`
where each sees its rows. `modules` finds which modules an optimizer steps, `drift` whether models stay equal, `processes`
refuses those that train. Used by the command, by way of `own_loop.launch`.
"""
