"""The backend "pycomm" of torch.distributed: its process groups run on communicators of ours.

After ``import pycomm``, ``torch.distributed.init_process_group("pycomm")`` makes them, and all that is built
on torch.distributed (FSDP, DTensor, pipelining, checkpoints, trainers) runs on pycomm's engine.

In reading order: autoload (how torch learns the name), group (the process group), tensors (what torch may
give and what the engine takes), works (handles of calls on their way), errors (torch's classes), recording
(the profiler's events), sparse (sparse all_reduce), backend (what torch asks of a device's backend),
monitored_barrier, by_name (two functions of torch that look at a backend's name), handed_over (works that
C++ must keep whole), lasting (the torches that do).
"""
