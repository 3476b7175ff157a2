"""The messages between the API process and the engine process.

A message is a frozen msgspec struct, encoded as msgpack; nothing is pickled. `message.py` has the
bases, and `wire.py` one tagged union for each direction: `ToEngine` and `FromEngine`.
`engine/client/channel.py` carries the messages over zmq and numbers them, so that a lost or
repeated message is detected.

| file | messages about |
|---|---|
| `generate.py` | requests that generate, and what they ask of sampling |
| `embed.py` | requests for vectors |
| `outputs.py` | the results of a step |
| `ready.py` | the engine's start and end |
| `watch.py`, `journal.py`, `lens.py`, `structure.py` | the inspectors |
| `adapters.py` | LoRA adapters |
| `compare.py` | the command that compares models |

The engine sends Progress while it loads the model and Ready when it can serve. The API process
then sends GenerateRequest and EmbedRequest messages. The engine sends one StepOutputs per step. A
request gets outputs until one of them has `finish` set, or Rejected if the engine refuses it; one
with `explain` also gets Explained messages before. Abort ends requests early, Shutdown ends the
engine, and Fatal says why an engine ends by itself.

All times are CLOCK_MONOTONIC seconds, which two processes on one host can compare. Request ids are
integers that the client assigns and never reuses.
"""
