"""A worker process with prescribed behaviour, in the protocol of collocation.service.worker and without torch."""

import os
import pickle
import sys
import time

from vramcast.collocation.service.worker import HEADER, REFUSED, TRACED


def answer(data: bytes) -> None:
    sys.stdout.buffer.write(HEADER.pack(len(data)) + data)
    sys.stdout.buffer.flush()


def main() -> None:
    if os.environ.get("ODD_WORKER_FAILS"):
        sys.exit(3)
    answer(b"ready")
    while len(head := sys.stdin.buffer.read(HEADER.size)) == HEADER.size:
        match pickle.loads(sys.stdin.buffer.read(HEADER.unpack(head)[0])):
            case "hang":
                time.sleep(60)
            case "die":
                os._exit(7)
            case "refuse":
                answer(pickle.dumps((REFUSED, "expected less, found more")))
            case "pid":
                answer(pickle.dumps((TRACED, str(os.getpid()).encode())))


if __name__ == "__main__":
    main()
