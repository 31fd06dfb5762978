"""The backend `manyhands` of torch.distributed.

group.py      the process group: collectives of this library's, and what goes through to gloo or nccl
versions.py   what torch calls differently from version to version

`manyhands_backend`, beside this package, registers it when torch is imported.
"""
