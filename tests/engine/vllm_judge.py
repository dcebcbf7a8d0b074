"""What the installed vLLM makes of commands: a program of its own, as importing vLLM changes the process it is in.

    python -m tests.engine.vllm_judge < commands.json

Reads a list of argument lists, and answers with JSON. No device is touched, and no model is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from typing import Any


def judge(commands: list[list[str]]) -> dict[str, Any]:
    """For each command, what vLLM has understood, or why it refuses; and what vLLM knows at all."""
    from vllm import envs
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def understood(argv: list[str]) -> dict[str, Any]:
        parser = make_arg_parser(FlexibleArgumentParser())
        arguments = argv[2:] if argv[:2] == ["vllm", "serve"] else argv[argv.index("vllm.entrypoints.openai.api_server") + 1 :]
        complaint = io.StringIO()
        try:
            with contextlib.redirect_stderr(complaint):
                parsed = parser.parse_args(arguments)
            validate_parsed_serve_args(parsed)
            engine = AsyncEngineArgs.from_cli_args(parsed)
            transfer = engine.kv_transfer_config
            for child in transfer.kv_connector_extra_config.get("connectors", []) if transfer else []:
                KVTransferConfig(**child)
        except (SystemExit, Exception) as error:
            return {"refused": complaint.getvalue() or repr(error)}
        return {
            "model": parsed.model_tag if getattr(parsed, "model_tag", None) else engine.model,
            "kv_transfer_config": dataclasses.asdict(engine.kv_transfer_config),
            "kv_events_config": dataclasses.asdict(engine.kv_events_config) if engine.kv_events_config else None,
            "is": {
                name: getattr(engine, name)
                for name in (
                    *("tensor_parallel_size", "data_parallel_size", "data_parallel_size_local", "data_parallel_start_rank"),
                    *("enable_expert_parallel", "all2all_backend", "block_size", "max_model_len", "kv_cache_dtype"),
                    *("max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs", "max_num_queued_tokens"),
                    *("enable_prefix_caching", "prefix_caching_hash_algo", "enforce_eager", "shutdown_timeout", "device_ids"),
                )
            },
        }

    def refuses(key: str) -> bool:
        try:
            KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_producer", **{key: 1})
        except Exception:
            return True
        return False

    parser = make_arg_parser(FlexibleArgumentParser())
    return {
        "commands": [understood(argv) for argv in commands],
        "flags": sorted({flag for action in parser._actions for flag in action.option_strings}),
        "connectors": sorted(KVConnectorFactory._registry),
        "transfer_keys": sorted(field.name for field in dataclasses.fields(KVTransferConfig)),
        "events_keys": sorted(field.name for field in dataclasses.fields(KVEventsConfig)),
        "variables": sorted(envs.environment_variables),
        "refused_keys": [key for key in ("kv_rank", "kv_parallel_size", "kv_buffer_size", "kv_ip") if refuses(key)],
    }


if __name__ == "__main__":
    # vLLM logs to standard output.
    answer_to = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        answer = judge(json.load(sys.stdin))
    json.dump(answer, answer_to)
