"""Time and memory of log-probs, entropy and collision, forward and backward: whole logits against scoring in parts.

    python tests/benchmarks/scoring.py
    python tests/benchmarks/scoring.py --tokens 512 --vocabulary 49152 --hidden 576 --repeats 5

Each measurement is a process of its own, and the variants take turns. Extra memory is the highest resident set size of
that process less what it had reached with the inputs in memory (getrusage, so Linux); the gradients of hidden states
and head are part of it in every variant. The full size needs 10 GB of free memory.
"""

import argparse
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median

import torch
from torch import Tensor

from stapo_lightning.linear_scores import LinearHead, score_linear
from stapo_lightning.scoring import CHUNK_ELEMENTS, part_elements, score_hidden

Scores = tuple[Tensor, Tensor, Tensor]


@dataclass
class Inputs:
    hidden: Tensor
    weight: Tensor
    tokens: Tensor
    temperature: float


@dataclass
class Measurement:
    seconds: float
    cpu_seconds: float  # over all threads: what other work on the machine disturbs least, with one thread
    extra_gigabytes: float
    log_prob: float  # mean
    entropy: float  # mean
    gradient: float  # norm of the head's

    def row(self, variant: str) -> str:
        return (
            f"{variant:15s}   {self.seconds:7.2f}   {self.cpu_seconds:11.2f}   {self.extra_gigabytes:8.3f}"
            f"   {self.log_prob:13.6f}   {self.entropy:12.6f}   {self.gradient:13.6f}"
        )


def naive(inputs: Inputs) -> Scores:
    """The whole logits at once, as one would write it down."""
    log_p = torch.log_softmax(inputs.hidden @ inputs.weight.T / inputs.temperature, dim=-1)
    log_probs = log_p.gather(-1, inputs.tokens[:, None])[:, 0]
    with torch.no_grad():
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1)
        collision = p.square().sum(-1)
    return log_probs, entropy, collision


def log_probs_alone(inputs: Inputs) -> Scores:
    """The least that whole logits can do: no temperature, entropy or collision."""
    loss = torch.nn.functional.cross_entropy(inputs.hidden @ inputs.weight.T, inputs.tokens, reduction="none")
    return -loss, torch.full_like(loss, torch.nan), torch.full_like(loss, torch.nan)


def in_parts(inputs: Inputs) -> Scores:
    """What a run does with a linear head."""
    columns = max(1, part_elements(inputs.hidden.device) // len(inputs.tokens))
    return score_linear(inputs.hidden, inputs.tokens, LinearHead(inputs.weight), inputs.temperature, columns)


def in_chunks(inputs: Inputs) -> Scores:
    """What a run does with any other head: chunks of tokens, whose gradients of the head are added up."""
    rows = max(1, CHUNK_ELEMENTS // len(inputs.weight))
    return score_hidden(inputs.hidden, inputs.tokens, LinearHead(inputs.weight), inputs.temperature, rows)


VARIANTS: dict[str, Callable[[Inputs], Scores]] = {
    "naive": naive,
    "log_probs_alone": log_probs_alone,
    "in_parts": in_parts,
    "in_chunks": in_chunks,
}
WHOLE = {"naive", "log_probs_alone"}  # what the others are compared with


def make_inputs(tokens: int, hidden: int, vocabulary: int) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, hidden, generator=generator).mul_(2 * hidden**-0.5).requires_grad_()
    return Inputs(states, weight, torch.randint(vocabulary, (tokens,), generator=generator), temperature=1.0)


def forward_and_backward(variant: str, inputs: Inputs) -> Scores:
    log_probs, entropy, collision = VARIANTS[variant](inputs)
    (log_probs * torch.linspace(-1, 1, len(log_probs))).sum().backward()
    return log_probs.detach(), entropy, collision


def highest_resident_gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def measure(variant: str, tokens: int, hidden: int, vocabulary: int, threads: int) -> Measurement:
    """One forward and backward in this process, which must be fresh."""
    torch.set_num_threads(threads)
    forward_and_backward(variant, make_inputs(64, 64, 512))  # threads and kernels are set up
    inputs = make_inputs(tokens, hidden, vocabulary)
    before = highest_resident_gigabytes()
    started, cpu_started = time.perf_counter(), time.process_time()
    log_probs, entropy, _ = forward_and_backward(variant, inputs)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    extra = highest_resident_gigabytes() - before
    gradient = torch.linalg.vector_norm(inputs.weight.grad).item()
    return Measurement(seconds, cpu_seconds, extra, log_probs.mean().item(), entropy.mean().item(), gradient)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["naive", "log_probs_alone", "in_parts"])
    arguments = parser.parse_args()
    size = (arguments.tokens, arguments.hidden, arguments.vocabulary, arguments.threads)

    print("tokens {}, hidden {}, vocabulary {}, threads {}, float32".format(*size))
    print("variant           seconds   CPU seconds   extra GB   mean log-prob   mean entropy   gradient norm")
    found: dict[str, list[Measurement]] = {variant: [] for variant in arguments.variants}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as fresh_process:
        for _ in range(arguments.repeats):
            for variant in arguments.variants:
                one = fresh_process.submit(measure, variant, *size).result()
                found[variant].append(one)
                print(one.row(variant), flush=True)
    for base in sorted(WHOLE & found.keys()):
        for variant in sorted(found.keys() - WHOLE):
            pairs = list(zip(found[variant], found[base], strict=True))
            time_ratio = median(ours.seconds / theirs.seconds for ours, theirs in pairs)
            cpu_ratio = median(ours.cpu_seconds / theirs.cpu_seconds for ours, theirs in pairs)
            smaller = median(theirs.extra_gigabytes / ours.extra_gigabytes for ours, theirs in pairs)
            print(
                f"{variant} against {base}: {time_ratio:.2f} times the time ({cpu_ratio:.2f} times the CPU time),"
                f" 1/{smaller:.1f} of the extra memory"
            )


if __name__ == "__main__":
    main()
