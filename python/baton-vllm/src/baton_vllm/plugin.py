"""What vLLM's API server loads (entry point `vllm.endpoint_plugins`): the replica's report, and the replica itself beside it."""

from __future__ import annotations

import asyncio
import logging
import shutil
from argparse import Namespace
from typing import Any

from . import compat, link
from .channel import FOLDER_KEY
from .engine import VllmEngine
from .replica import Replica

log = logging.getLogger("vllm.baton")


class Plugin:
    name = "baton"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.replica: Replica | None = None
        self.serving: asyncio.Task | None = None

    def attach_router(self, app: Any) -> None:
        from fastapi import HTTPException

        @app.get("/baton/v1/replica")
        async def report() -> dict:
            if self.replica is None:
                raise HTTPException(503, "the replica has not begun")
            return self.replica.report()

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        config = engine_client.vllm_config
        extra = config.kv_transfer_config.kv_connector_extra_config
        compat.refuse(compat.server_problems(args, config.model_config.get_diff_sampling_param()))
        models = list(args.served_model_name or [args.model])
        engine = VllmEngine(engine_client, extra[FOLDER_KEY], models, extra["baton_staging_bytes"])
        await engine.meet()
        # All three have connected: nobody else should.
        shutil.rmtree(extra[FOLDER_KEY], ignore_errors=True)
        key = link.read_fleet_key(extra["baton_fleet_key_file"]) if extra["baton_fleet_key_file"] else None
        sockets = [link.bind(extra["baton_host"], extra[port], key) for port in ("baton_migration_port", "baton_migration_kv_port")]
        name = extra["baton_name"] or f"vllm-{args.host or 'localhost'}-{args.port}"
        self.replica = Replica(engine, name, key, *sockets)
        self.serving = asyncio.ensure_future(self.replica.serve())
        self.serving.add_done_callback(ended)
        log.info("requests move here over %s and %s; numerics: %s", self.replica.control_address, self.replica.kv_address, engine.numerics_id)


def ended(task: asyncio.Task) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("the replica has ended, and requests go on over HTTP alone", exc_info=task.exception())
