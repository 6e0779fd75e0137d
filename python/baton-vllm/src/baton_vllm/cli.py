"""`baton-vllm serve`: vLLM's own API server, with the connector and the plugin that make it a replica."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile

from . import compat, link
from .channel import FOLDER_KEY
from .engine import DEFAULT_STAGING_BYTES

SERVER = "vllm.entrypoints.openai.api_server"
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins", "vllm.stat_logger_plugins")


def parser() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser(prog="baton-vllm serve", description=__doc__, epilog="All other arguments are vLLM's.", allow_abbrev=False)
    described.add_argument("--baton-name", help="of this replica in its fleet, the same over restarts; by default its host and port")
    described.add_argument("--baton-host", default="127.0.0.1", help="address that gateways and other replicas reach it by; one that is not loopback takes a fleet key")
    described.add_argument("--baton-migration-port", type=int, default=0, help="where gateways connect; 0 takes a free one, which the report tells")
    described.add_argument("--baton-migration-kv-port", type=int, default=0, help="where sources take KV")
    described.add_argument("--baton-fleet-key-file", help="with the secret that all gateways and replicas of the fleet know")
    described.add_argument("--baton-staging-bytes", type=int, default=DEFAULT_STAGING_BYTES, help="memory for blocks on their way out and in")
    return described


def plugins(allowed: str | None) -> str:
    """vLLM loads this one only by name, and then those alone that are named: the others stay."""
    if allowed is not None:
        names = [name for name in allowed.split(",") if name]
    else:
        names = sorted({found.name for group in PLUGIN_GROUPS for found in importlib.metadata.entry_points(group=group)})
    return ",".join([*names, "baton"])


def command(arguments: list[str], folder: str) -> list[str]:
    """What vLLM is started with."""
    options, others = parser().parse_known_args(arguments)
    given = {other.split("=")[0] for other in others}
    for ours in ("--kv-transfer-config", "--logits-processors"):
        if ours in given:
            raise ValueError(f"{ours} is this program's, and others beside it were not tried")
    extra = {FOLDER_KEY: folder, **vars(options)}
    connector = {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "baton_vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    own = ["--disable-hybrid-kv-cache-manager", "--no-async-scheduling", "--logits-processors", compat.DRAWS]
    if "--generation-config" not in given:
        own += ["--generation-config", "vllm"]
    return [sys.executable, "-m", SERVER, *others, *own, "--kv-transfer-config", json.dumps(connector)]


def check(arguments: list[str]) -> None:
    """What can be known before vLLM has started, which takes a minute."""
    import vllm

    problem = compat.version_problem(vllm.__version__)
    compat.refuse([problem] if problem else [])
    options, _ = parser().parse_known_args(arguments)
    key = link.read_fleet_key(options.baton_fleet_key_file) if options.baton_fleet_key_file else None
    link.bind(options.baton_host, options.baton_migration_port, key).close()


def main() -> None:
    if sys.argv[1:2] != ["serve"]:
        sys.exit("usage: baton-vllm serve [--baton-…] [vLLM's arguments]; --help tells more")
    arguments = sys.argv[2:]
    if "--help" in arguments or "-h" in arguments:
        parser().print_help()
        return
    try:
        check(arguments)
        folder = tempfile.mkdtemp(prefix="baton-vllm-")
        started = command(arguments, folder)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    os.environ["VLLM_PLUGINS"] = plugins(os.environ.get("VLLM_PLUGINS"))
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    os.execv(started[0], started)


if __name__ == "__main__":
    main()
