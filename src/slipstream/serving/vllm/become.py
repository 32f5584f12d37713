"""The child process before it is vLLM: run by vLLM's interpreter as a script, so it imports nothing but the standard library."""

import ctypes
import os
import signal
import sys

SERVER = "vllm.entrypoints.openai.api_server"
"""The `vllm` command is missing from rebuilds under another name; the module is there in all of them."""


def main(argv: list[str]) -> None:
    """End with the parent, however it goes (Linux only), then be vLLM's server."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != int(os.environ["SLIPSTREAM_PARENT"]):
        raise SystemExit("the process that started this server is gone")
    os.execv(sys.executable, [sys.executable, "-m", SERVER, *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
