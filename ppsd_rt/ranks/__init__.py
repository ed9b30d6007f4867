"""Pipeline over processes and hosts: each rank of `torch.distributed` is one stage. See docs/guide/pipeline.md."""
