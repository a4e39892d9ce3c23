"""The README's reconnecting clients as programs that print each chunk on a line of its own."""

import asyncio
import json
import re
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
MAX_LINES = 40
_SECONDS = 60.0

_PYTHON_MAIN = """
import sys

for chunk in stream(json.loads(sys.argv[1]), sys.argv[2:], patience=20):
    print(json.dumps(chunk), flush=True)
"""
_JAVASCRIPT_MAIN = """
import { stream } from "./reconnect.mjs";

const [body, ...gateways] = process.argv.slice(2);
for await (const chunk of stream(JSON.parse(body), gateways, 20)) {
  console.log(JSON.stringify(chunk));
}
"""

# Takes a body and the gateways' host:port; returns the chunks that the client yielded.
ReadmeClient = Callable[[Mapping[str, Any], Sequence[str]], Awaitable[list[dict[str, Any]]]]


def readme_block(language: str, name: str) -> str:
    """The code block whose first line is a comment with `name`."""
    blocks: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.S | re.M)
    (block,) = [block for block in blocks if name in block.partition("\n")[0]]
    return block


@pytest.fixture(params=["python", "js"])
def readme_client(request: pytest.FixtureRequest, tmp_path: Path) -> ReadmeClient:
    if request.param == "python":
        program = tmp_path / "reconnect.py"
        program.write_text(readme_block("python", "reconnect.py") + _PYTHON_MAIN)
        command = [sys.executable, "-W", "error", str(program)]
    else:
        node = shutil.which("node")
        if node is None:
            pytest.skip("Node.js is not installed")
        (tmp_path / "reconnect.mjs").write_text(readme_block("js", "reconnect.mjs"))
        program = tmp_path / "main.mjs"
        program.write_text(_JAVASCRIPT_MAIN)
        command = [node, str(program)]

    async def run(body: Mapping[str, Any], gateways: Sequence[str]) -> list[dict[str, Any]]:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, json.dumps(body), *gateways, stdout=pipe, stderr=pipe
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), _SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, errors.decode()
        return [json.loads(line) for line in output.splitlines()]

    return run
