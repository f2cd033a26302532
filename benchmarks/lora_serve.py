"""Requests for different adapters, at the same time, against a server: each answer beside that of its own run alone.

    python -m benchmarks.lora_serve BUNDLE [--requests 1000] [--clients 4] [--prompts 25] [--new 8] [--cpu-mode fast]

BUNDLE has slots and adapters. Request i asks for adapter i modulo their number (and none), and for a drawn prompt:
beginnings that some prompts share make the prefix cache work. The clients are OpenAI's. A run alone has a loaded model
of its own without other sessions, and an empty cache. It ends with the exit code 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import edgekv
from edgekv.bundle import lora_adapters, open_bundle
from tests.serving import NAME, Server, served

WORDS = (
    "the",
    "a",
    "of",
    "import",
    "return",
    "if",
    "not",
    "value",
    "list",
    "name",
    "self",
    "for",
    "in",
    "with",
    "open",
)

Request = tuple[str | None, str]


def draw(adapters: list[str | None], requests: int, prompts: int) -> list[Request]:
    """Requests that alternate between the adapters; prompts have 3 to 40 words."""
    random.seed(0)
    beginning = " ".join(random.choices(WORDS, k=40))
    texts = [f"{beginning[: random.randrange(120)]} {' '.join(random.choices(WORDS, k=3))}" for _ in range(prompts)]
    return [(adapters[number % len(adapters)], random.choice(texts)) for number in range(requests)]


def run_alone(bundle: Path, requests: set[Request], new: int, mode: str) -> dict[Request, str]:
    """The answer to each request from an empty cache."""
    found: dict[Request, str] = {}
    with edgekv.load(bundle, threads=1, cpu_mode=mode) as model:
        for lora, prompt in sorted(requests, key=str):
            model.session.reset()
            generation = model.generate(prompt, new, temperature=0, lora=lora)
            found[lora, prompt] = "".join(token.text for token in generation)
    return found


def ask(server: Server, request: Request, new: int) -> str:
    """The server's answer."""
    lora, prompt = request
    model = NAME if lora is None else f"{NAME}:{lora}"
    with server.client() as client:
        answer = client.completions.create(model=model, prompt=prompt, max_tokens=new, temperature=0)
    return answer.choices[0].text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=25)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--cpu-mode", default="emulate")
    args = parser.parse_args()
    adapters = [None, *(each.record.name for each in lora_adapters(open_bundle(args.bundle)))]
    requests = draw(adapters, args.requests, args.prompts)
    alone = run_alone(args.bundle, set(requests), args.new, args.cpu_mode)
    with served(args.bundle, cpu_mode=args.cpu_mode) as server, ThreadPoolExecutor(args.clients) as clients:
        began = perf_counter()
        answers = list(clients.map(lambda request: ask(server, request, args.new), requests))
        took_s = perf_counter() - began
    differing = [request for request, answer in zip(requests, answers, strict=True) if answer != alone[request]]
    by_prompt: dict[str, set[str]] = {}
    for (_, prompt), text in alone.items():
        by_prompt.setdefault(prompt, set()).add(text)
    print(
        f"{len(requests)} requests by {args.clients} clients, {len(adapters) - 1} adapters and none, {len(alone)} "
        f"different ones, in {took_s:.0f} s"
    )
    print(f"{sum(len(texts) > 1 for texts in by_prompt.values())} of {len(by_prompt)} prompts depend on the adapter")
    print(f"{len(differing)} answers differ from those of runs alone")
    if differing:
        print(f"the first: {differing[0]}")
        sys.exit(1)


if __name__ == "__main__":
    main()
