"""Hugging Face Accelerate on the backend "pycomm": torchrun --nproc-per-node 2 accelerate_train.py

On CPUs Accelerate takes gloo (or MPI) whatever it is told: ``InitProcessGroupKwargs(backend="pycomm")`` is
answered with "Your assigned backend pycomm is not available, please use gloo". But it uses a process group
that it finds initialised, so the one line of torch's below is all that a script needs. (Its own
``accelerate.state.backend`` still says gloo; it decides by it only which of two all_gathers it calls.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import pycomm  # noqa: F401 (it registers the backend)
from small_model import BATCH, EPOCHS, LEARNING_RATE, make_data, make_model, options, report


def main() -> None:
    args = options(__doc__)
    dist.init_process_group(args.backend)  # before the Accelerator
    # split_batches: the loader's batch is that of all ranks together.
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(make_data(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    mean = torch.zeros(())
    for _ in range(EPOCHS):
        for points, classes in loader:
            loss = cross_entropy(model(points), classes)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), reduction="mean")

    guesses, answers = [], []
    model.eval()
    with torch.no_grad():
        for points, classes in loader:
            guess, answer = accelerator.gather_for_metrics((model(points).argmax(dim=1), classes))
            guesses.append(guess)
            answers.append(answer)
    right = (torch.cat(guesses) == torch.cat(answers)).double().mean()
    accelerator.print(f"{torch.cat(guesses).numel()} points, {right:.1%} right")
    if accelerator.is_main_process:
        report(args.out, accelerator.unwrap_model(model).named_parameters(), mean.item())
    accelerator.end_training()  # also destroys the process group


if __name__ == "__main__":
    main()
