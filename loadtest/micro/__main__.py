"""Small measurements, each of one cost: `python -m loadtest.micro CASE`."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import ExitStack

from loadtest.micro import (
    adapters,
    api_cost,
    draw,
    embeddings,
    gguf_types,
    grammar_cost,
    host_budget,
    hybrid,
    images,
    kv_restart,
    latent_attention,
    linear_layers,
    perplexity,
    recorded_steps,
    recurrent_layers,
    several_models,
    speculation,
    watch_cost,
    watch_steps,
)
from loadtest.program import run_program

CASES = {
    "adapters": adapters.CASE,
    "api-cost": api_cost.CASE,
    "draw": draw.CASE,
    "embeddings": embeddings.CASE,
    "gguf-types": gguf_types.CASE,
    "grammar-cost": grammar_cost.CASE,
    "host-budget": host_budget.CASE,
    "hybrid": hybrid.CASE,
    "images": images.CASE,
    "kv-restart": kv_restart.CASE,
    "latent-attention": latent_attention.CASE,
    "linear-layers": linear_layers.CASE,
    "perplexity": perplexity.CASE,
    "recorded-steps": recorded_steps.CASE,
    "recurrent-layers": recurrent_layers.CASE,
    "several-models": several_models.CASE,
    "speculation": speculation.CASE,
    "watch-cost": watch_cost.CASE,
    "watch-steps": watch_steps.CASE,
}


def main() -> None:
    """Run a case and print its tables. A bound that is missed ends the program with status 1."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.micro", description=__doc__)
    cases = parser.add_subparsers(dest="case", metavar="CASE", required=True)
    for name, case in CASES.items():
        summary = case.about.partition("\n")[0]
        case.add_options(cases.add_parser(name, help=summary, description=case.about))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are stopped
    missed = 0
    with ExitStack() as stack:
        for table in CASES[options.case].measure(options, stack):
            print(table, flush=True)
            missed += len(table.missed())
    sys.exit(bool(missed))


if __name__ == "__main__":
    run_program(main)
