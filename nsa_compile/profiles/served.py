"""What a process does that `prefixes` starts. torch is imported with its work, not before."""

from __future__ import annotations

from multiprocessing.connection import Connection

from nsa_compile.errors import UserError
from nsa_compile.launch.worker import die_with


def serve(descriptor: int, parent: int) -> None:
    """Do the one piece of work that comes through a connection, and send its messages back."""
    die_with(parent)
    with Connection(descriptor) as connection:
        measure, work, without = connection.recv()
        try:
            measure(work, without, lambda kind, content: connection.send((kind, content)))
            connection.send(("done", None))
        except UserError as error:
            connection.send(("failed", error))
        except (RuntimeError, MemoryError) as error:
            from nsa_compile.profiles.blame import first_line
            from nsa_compile.profiles.measure import ran_out_of_memory

            if not ran_out_of_memory(error):
                raise
            reason = f"memory does not suffice for what comes before and after the prefixes: {first_line(error)}"
            connection.send(("failed", UserError(f"{reason}; give fewer tokens with --seq-len")))
