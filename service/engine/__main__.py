"""Entry of the engine process: `python -m service.engine`, started by EngineClient and of no use by hand.

Light until the parent is being watched and signals are settled; torch is imported after that.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
import traceback

import msgspec
import zmq

from service.errors import StartupError
from service.logs import configure_logging

from .config import Launch
from .protocol import EngineFailed, LoadProgress

# How often the parent's pid is looked at, beside the pipe. Only matters if something else holds the pipe
# open.
_PARENT_CHECK_SECONDS = 1.0


def main() -> int:
    """Run the engine until its parent ends it; the exit status is 1 when it failed."""
    # Ctrl-C and a service manager's SIGTERM reach the whole process group, but open streams shall finish
    # first: the parent decides, and the pipe's end or SIGKILL get through in any case.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    configure_logging(launch.log_level, launch.config.log_format)
    threading.Thread(
        target=_watch_parent, args=(launch.parent_pid,), name="parent-watch", daemon=True
    ).start()

    context = zmq.Context()
    outputs = context.socket(zmq.PUSH)
    outputs.set_hwm(0)
    outputs.connect(launch.outputs)
    try:
        outputs.send(msgspec.msgpack.encode(LoadProgress(stage="import torch", fraction=0.0)))
        from .worker import Worker

        commands = context.socket(zmq.PULL)
        commands.set_hwm(0)
        commands.connect(launch.commands)
        Worker(launch.config, commands, outputs).run()
    except Exception as error:
        if not isinstance(error, StartupError):  # whose message says it all
            traceback.print_exc()
        outputs.send(msgspec.msgpack.encode(EngineFailed(kind=type(error).__name__, message=str(error))))
        return 1
    finally:
        context.destroy(linger=1000)
    return 0


def _watch_parent(parent_pid: int) -> None:
    """End this process when the parent has gone: nobody is left to hear it, and it holds much memory."""
    while os.getppid() == parent_pid:
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], _PARENT_CHECK_SECONDS)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
    os._exit(1)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    # The messages are out; taking the interpreter, torch and gigabytes of tensors down in order takes seconds
    # that the parent would wait for.
    os._exit(status)
