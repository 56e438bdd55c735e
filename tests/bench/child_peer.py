"""A peer in a process of its own, spoken to in JSON lines (see peer_protocol.py)."""

import json
import subprocess
from collections.abc import Sequence
from typing import IO, Any

from tests.bench.prompts import Prompt
from tests.bench.timed import TokenTimes


class ChildPeer:
    """Starts with the constructor, which waits until the peer is ready; `close` ends it."""

    def __init__(self, name: str, command: Sequence[str], largest_batch: int = 8) -> None:
        self.name = name
        self.largest_batch = largest_batch
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        ready = self._read()
        assert "ready" in ready, f"{name} did not start: {ready}"

    def measure(self, prompts: Sequence[Prompt], max_tokens: int, salt: str) -> float:
        """Seconds for the whole batch, as the peer itself measured them. `salt` has no meaning here."""
        return float(self._ask(prompts, max_tokens)["seconds"])

    def timed(self, prompt: Prompt, max_tokens: int) -> TokenTimes:
        """One answer of exactly `max_tokens` tokens, of a peer that tells when it had the first one."""
        reply = self._ask([prompt], max_tokens)
        first_s, whole_s = float(reply["first_seconds"]), float(reply["seconds"])
        return TokenTimes(tuple(reply["answers"][0]), 1, first_s, whole_s)

    def _ask(self, prompts: Sequence[Prompt], max_tokens: int) -> dict[str, Any]:
        request = {"prompts": [list(prompt.token_ids) for prompt in prompts], "max_tokens": max_tokens}
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        reply = self._read()
        counts = {len(answer) for answer in reply["answers"]}
        assert counts == {max_tokens}, f"{self.name} answered {counts} tokens"
        return reply

    def close(self) -> None:
        """Ends the process."""
        for stream in (self._process.stdin, self._process.stdout):
            _close(stream)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        assert line, f"{self.name} ended: exit code {self._process.poll()}"
        reply: dict[str, Any] = json.loads(line)
        return reply


def _close(stream: IO[str] | None) -> None:
    if stream is not None:
        stream.close()
