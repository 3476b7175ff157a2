"""The process of a rank that follows rank 0: `python -m engine.parallel.follower`.

Its messages come over stdin. It ends with rank 0: by Linux's parent-death signal, or when stdin or
a connection between the ranks closes. Errors go to stderr.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
import time

import torch

from engine.device.board import Board
from engine.device.parent import die_with_parent
from engine.device.ranks import Ranks
from engine.errors import ConfigError
from engine.parallel.channel import Receiver
from engine.parallel.follow import follow
from engine.parallel.messages import Begin
from engine.runner.load import load_engine

# Seconds for rank 0 to find and report the same problem. It ends the process of this rank then.
SAME_PROBLEM_S = 5.0


def main() -> int:
    """Follow rank 0 until it closes the pipe. Returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they reach the whole process group
    faulthandler.enable()
    die_with_parent()
    receiver = Receiver(sys.stdin.buffer)
    try:
        begin = receiver.receive()
    except EOFError:
        return 0  # rank 0 has found that the model cannot be served
    assert isinstance(begin, Begin)
    place, rank = begin.place, begin.rank
    board = Board(rank, begin.config.tensor_parallel_size, begin.board)
    logging.basicConfig(format=f"rank {rank}: %(message)s", level=logging.WARNING)

    def connect(ranks: Ranks, device: torch.device) -> None:
        ranks.connect(device, place, board)

    try:
        runner = load_engine(begin.config, rank=rank, connect=connect).runner
    except ConfigError as error:
        time.sleep(SAME_PROBLEM_S)
        logging.getLogger(__name__).error("%s", error)
        return 2
    follow(runner, receiver, board)
    return 0


if __name__ == "__main__":
    sys.exit(main())
