"""What the `tokenline` command does: up, pull, chat, ps."""

import asyncio
import sys
from importlib.metadata import version
from typing import Annotated, Final

import typer
from rich.console import Console

from compose.chat import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_TEMPERATURE,
    Conversation,
    ask_once,
    talk,
)
from compose.directories import models_directory, state_directory
from compose.errors import CommandError
from compose.gateway_client import GatewayClient
from compose.line import LineOptions
from compose.local import run_line
from compose.model_store import DEFAULT_MODEL, ModelStore
from compose.own_command import own_command
from compose.ports import free_ports
from compose.process_table import show_lines
from compose.state_file import running_lines

_DEFAULT_PORT: Final = 8000
_ENGINE_PANEL: Final = "Engine options (each engine's own default where not given)"

_ApiKey = Annotated[
    str,
    typer.Option(
        envvar="TOKENLINE_API_KEY",
        show_envvar=True,
        show_default=False,
        help="The key, for gateways that ask for one; other users can see flags, not variables.",
    ),
]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def run() -> None:
    """Runs the command; a CommandError becomes one line on stderr and exit code 1."""
    try:
        app()
    except CommandError as error:
        sys.stderr.write(f"tokenline: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _engine_option(help_text: str) -> typer.models.OptionInfo:
    return typer.Option(help=help_text, rich_help_panel=_ENGINE_PANEL, show_default=False)  # type: ignore[no-any-return]


def _count_option(noun: str) -> typer.models.OptionInfo:
    return typer.Option(help=f"How many {noun} to run.", min=1, max=64)  # type: ignore[no-any-return]


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"tokenline {version('tokenline')}\n")
        raise typer.Exit


@app.callback()
def tokenline(
    _: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Shows the version, and ends."
        ),
    ] = False,
) -> None:
    """Serves large language models over an OpenAI-compatible API, as a line of small services."""


@app.command()
def up(
    model: Annotated[
        str,
        typer.Option(
            help="A known name, an HF directory, a GGUF file, or what was pulled: ORG/NAME[:FILE]."
        ),
    ] = DEFAULT_MODEL.name,
    served_model_name: Annotated[
        str, typer.Option(help="The name in the API; made from the model's files where empty.")
    ] = "",
    port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="Port of the API; further gateways take the next ones. 0: any free port.",
        ),
    ] = _DEFAULT_PORT,
    host: Annotated[
        str, typer.Option(help="Address that the API listens on; 0.0.0.0 is everywhere.")
    ] = "127.0.0.1",
    redis: Annotated[
        str, typer.Option(help="URL of a Redis or Valkey server; empty: an embedded one.")
    ] = "",
    gateways: Annotated[int, _count_option("gateways")] = 1,
    tokenizers: Annotated[int, _count_option("tokenizer services")] = 1,
    detoks: Annotated[int, _count_option("detokenizer services")] = 1,
    engines: Annotated[int, _count_option("engines")] = 1,
    max_num_seqs: Annotated[
        int | None, _engine_option("The most sequences that run at once.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, _engine_option("The most tokens computed in one step.")
    ] = None,
    max_model_len: Annotated[
        int | None, _engine_option("The most tokens of one sequence, prompt and output together.")
    ] = None,
    kv_memory: Annotated[
        str | None,
        _engine_option(
            "Memory for each engine's KV cache, such as 2GiB; else a share of what is free."
        ),
    ] = None,
    block_size: Annotated[int | None, _engine_option("Tokens per KV block.")] = None,
    num_threads: Annotated[int | None, _engine_option("CPU threads of each engine.")] = None,
    dtype: Annotated[str | None, _engine_option("auto, int8, fp8, bfloat16 or float32.")] = None,
) -> None:
    """Starts the whole line, and stops it on Ctrl-C.

    Waits until the API is ready, then prints its URL and a curl command to try.
    """
    given = {
        "--max-num-seqs": max_num_seqs,
        "--max-num-batched-tokens": max_num_batched_tokens,
        "--max-model-len": max_model_len,
        "--kv-memory": kv_memory,
        "--block-size": block_size,
        "--num-threads": num_threads,
        "--dtype": dtype,
    }
    engine_settings = {flag: value for flag, value in given.items() if value is not None}
    if port + gateways > 65536:
        raise CommandError(
            f"{gateways} gateways do not fit above port {port}: choose a lower --port"
        )
    console = Console()
    options = LineOptions(
        model_path=ModelStore(models_directory(), console).resolve(model),
        host=host,
        gateway_ports=tuple(range(port, port + gateways) if port else free_ports(gateways)),
        num_tokenizers=tokenizers,
        num_detoks=detoks,
        num_engines=engines,
        redis_url=redis,
        served_model_name=served_model_name,
        engine_arguments=tuple(
            text for flag, value in engine_settings.items() for text in (flag, str(value))
        ),
    )
    finished = asyncio.run(run_line(options, console, state_directory()))
    raise typer.Exit(0 if finished else 130)


@app.command()
def pull(
    model: Annotated[
        str,
        typer.Argument(
            help="A known name, or a Hugging Face repository as ORG/NAME or ORG/NAME:FILE.gguf."
        ),
    ] = DEFAULT_MODEL.name,
) -> None:
    """Fetches a model into the cache directory, for `tokenline up --model`.

    Of a hub repository only the files that are served are fetched; HF_TOKEN opens gated ones.
    """
    console = Console()
    path = ModelStore(models_directory(), console).pull(model)
    console.print(f"{model} is at {path}", soft_wrap=True, markup=False, highlight=False)


@app.command()
def chat(
    question: Annotated[
        str | None, typer.Argument(help="Asks only this, and ends after the answer.")
    ] = None,
    url: Annotated[
        str, typer.Option(help="Where the API is; empty: the line that runs on this machine.")
    ] = "",
    api_key: _ApiKey = "",
    system: Annotated[str, typer.Option(help="A system message to begin with.")] = "",
    temperature: Annotated[
        float,
        typer.Option(
            min=0, max=2, help="0 always takes the likeliest token; small models need it low."
        ),
    ] = DEFAULT_TEMPERATURE,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The most tokens of an answer.",
            show_default=f"{DEFAULT_MAX_TOKENS}, or half of a smaller context",
        ),
    ] = None,
) -> None:
    """Talks with the model; answers stream, with their tokens per second."""
    console = Console()
    with GatewayClient(url or _local_url(), api_key) as client:
        conversation = Conversation(client, console, system, temperature, max_tokens)
        code = talk(conversation, console) if question is None else ask_once(conversation, question)
    raise typer.Exit(code)


@app.command()
def ps(api_key: _ApiKey = "") -> None:
    """Shows the processes of each running line, and the requests that are live."""
    lines = running_lines(state_directory())
    if not lines:
        raise CommandError(f"no line runs here: start one with `{own_command()} up`")
    show_lines(lines, Console(), api_key)


def _local_url() -> str:
    """The first gateway of the line that was started last; the default port where none is known."""
    lines = running_lines(state_directory())
    if not lines:
        return f"http://127.0.0.1:{_DEFAULT_PORT}"
    url = lines[-1].gateway_urls[0]
    if len(lines) > 1:
        sys.stderr.write(
            f"{len(lines)} lines run here; this is the latest, at {url}: --url names another\n"
        )
    return url
