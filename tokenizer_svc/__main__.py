"""Runs the tokenizer service: `python -m tokenizer_svc --model PATH`."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from protos.common.v1 import common_pb2
from protos.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from protos.wire.errors import StartupError
from protos.wire.model_files import fingerprint, model_name
from protos.wire.process_memory import release_free_memory
from protos.wire.server import GrpcServer
from protos.wire.service import install_stop_signals, run_main
from tokenizer_svc.control_tokens import control_tokens
from tokenizer_svc.prompt_limit import PromptLimit
from tokenizer_svc.service import ServedTokenizer, TokenizerService
from tokenizer_svc.settings import Settings
from tokenizer_svc.template_messages import Setup
from tokenizer_svc.template_workers import TemplateWorkers
from tokenizer_svc.text_decoder import TextDecoder
from tokenizer_svc.text_encoder import TextEncoder
from tokenizer_svc.token_bound import token_bound
from tokenizer_svc.tokenizer_files import TokenizerFiles
from tokenizer_svc.tokenizer_source import load_tokenizer_files

SERVICE: Final = "tokenizer_svc"
_THINK: Final = "<think>"
GRPC_SERVICE: Final = "protos.tokenizer.v1.TokenizerService"


async def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT; raises StartupError."""
    # The service's threads are the parallelism; the library's own would compete with them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    stop = install_stop_signals()
    server = GrpcServer(SERVICE, settings.host, settings.port, settings.max_message_size)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server)
        files = load_tokenizer_files(settings.model)
        if settings.chat_template is not None:
            files = _with_template(files, settings.chat_template)
        executor = stack.enter_context(ThreadPoolExecutor(settings.num_workers, "encode"))
        templates = None
        if files.chat_templates:
            workers = TemplateWorkers(_setup(files, settings), settings.num_template_workers)
            templates = await stack.enter_async_context(workers)
        service = TokenizerService(
            _served(files, settings, templates),
            TextEncoder(files.tokenizer),
            TextDecoder(files.tokenizer),
            templates,
            executor,
            settings.max_message_size,
            PromptLimit(
                settings.max_prompt_tokens or files.context_length, token_bound(files.tokenizer)
            ),
            max_running=settings.num_workers + settings.num_template_workers,
        )
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(service, server.grpc)
        release_free_memory()
        await server.serve_until_stopped(stop, services=[GRPC_SERVICE])


def _with_template(files: TokenizerFiles, path: Path) -> TokenizerFiles:
    try:
        return replace(files, chat_templates={"default": path.read_text(encoding="utf-8")})
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the chat template {path}: {error}") from error


def _setup(files: TokenizerFiles, settings: Settings) -> Setup:
    return Setup(
        templates=dict(files.chat_templates),
        special_tokens=dict(files.special_tokens),
        control_texts=[token.content for token in control_tokens(files.tokenizer).values()],
        max_output_characters=settings.max_message_size,
        max_memory_bytes=settings.template_memory,
        max_seconds=settings.template_seconds,
    )


def _served(
    files: TokenizerFiles, settings: Settings, templates: TemplateWorkers | None
) -> ServedTokenizer:
    """The turn ends that the templates write end an answer too, whatever the files call EOS."""
    turn_ends = templates.turn_ends if templates is not None else frozenset()
    turn_end_ids = (files.tokenizer.token_to_id(text) for text in turn_ends)
    eos_token_ids = {*files.eos_token_ids, *(i for i in turn_end_ids if i is not None)}
    return ServedTokenizer(
        model=common_pb2.ModelIdentity(
            name=settings.served_model_name or model_name(settings.model),
            fingerprint=fingerprint(settings.model),
        ),
        tokenizer_json=files.tokenizer.to_str().encode(),
        eos_token_ids=tuple(sorted(eos_token_ids)),
        context_length=files.context_length,
        generation_defaults=files.generation_defaults,
        tool_call_format=_tool_call_format(templates),
        has_reasoning=_has_reasoning(files),
    )


def _tool_call_format(
    templates: TemplateWorkers | None,
) -> tokenizer_pb2.ToolCallFormat.ValueType:
    name = (templates.tool_call_format if templates is not None else "") or "UNSPECIFIED"
    return tokenizer_pb2.ToolCallFormat.Value(f"TOOL_CALL_FORMAT_{name}")


def _has_reasoning(files: TokenizerFiles) -> bool:
    """Models that think aloud have a token for it, or a template that knows the mark."""
    in_template = any(_THINK in template for template in files.chat_templates.values())
    return in_template or files.tokenizer.token_to_id(_THINK) is not None


if __name__ == "__main__":
    run_main(SERVICE, Settings, serve)
