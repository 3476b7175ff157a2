"""Limits of grammars: of one, of those of a tenant, and of all together."""

from __future__ import annotations

MAX_SOURCE_BYTES = 512 << 10
COMPILE_CPU_S = 2.0  # CPU time to compile a grammar and to compute its first mask
CALL_CPU_S = 0.5  # CPU time of a token
CALL_S = 15.0  # the same on the clock: a process of low priority waits for others
GRAMMAR_BYTES = 64 << 20  # memory that one grammar may hold
STACK_BYTES = 32 << 20  # of the compiling thread; only what is used takes memory
# The process that reads the tokenizer, and those of all grammars.
ALL_BYTES = 384 << 20
TENANT_BYTES = ALL_BYTES // 2
MOST_COMPILING = 4  # at once, one for each tenant
END_S = 2.0  # without CPU time, after which a forker that was to kill a process is stuck
QUEUE_S = 20.0  # for a grammar's turn to begin
NO_MEMORY_STATUS = 77  # exit status of a process after a MemoryError
