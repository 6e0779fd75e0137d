"""The KV connector that vLLM loads: takes a running request's blocks out while it decodes, and blocks of one that comes in.

Its scheduler half says in each step which blocks to copy, its worker half copies them between the KV cache and the staging memory. All else
is the API server's. Only the public connector interface (v1) is used."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from . import compat
from .channel import FOLDER_KEY, Listening
from .staging import HEAD_BYTES, Signs, Staging

# Of this size goes out in one step beside the last blocks: the neighbours' steps take longer by its copy.
STEP_BYTES = 8 << 20
# Of a request's tokens, the last ones are told when it ends: those that the API server has not seen yet are among them.
TOLD_TOKENS = 256
# From so many tokens on a step's time says how long a token takes.
PREFILL_TOKENS = 32
# What a step takes at most, as long as none was seen.
FIRST_STEP_S = 60.0


@dataclass
class Meta(KVConnectorMetadata):
    # (slot, block)
    loads: list = field(default_factory=list)
    # Runs whose loads are in it.
    loaded: list = field(default_factory=list)
    # (export, index, tokens, block, slot)
    copies: list = field(default_factory=list)
    # Requests whose blocks can be freed after it.
    freed: list = field(default_factory=list)
    tokens: int = 0
    free_blocks: int = 0


@dataclass
class Export:
    name: str
    following: int
    slots: list
    preemptions: int


class BatonConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        problem = compat.version_problem(vllm.__version__)
        compat.refuse([problem] if problem else [])
        compat.refuse(compat.config_problems(vllm_config) + compat.cache_problems(kv_cache_config))
        folder = self._kv_transfer_config.get_from_extra_config(FOLDER_KEY, None)
        if folder is None:
            raise ValueError("the connector is started by `baton-vllm serve`, which says where to meet")
        self.block_size, self.num_blocks = vllm_config.cache_config.block_size, kv_cache_config.num_blocks
        if role == KVConnectorRole.SCHEDULER:
            self.half: Any = SchedulerHalf(self, Listening(folder, "scheduler"))
        else:
            self.half = WorkerHalf(self, Listening(folder, "worker"))

    @property
    def requires_kv_delivery(self) -> bool:
        # A move that does not come about costs nothing but itself.
        return False

    # In the scheduler.

    def on_new_request(self, request: Any) -> None:
        self.half.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self.half.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.half.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Meta:
        return self.half.step(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.half.finished(request, block_ids), None

    # In the worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.half.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Meta) -> None:
        self.half.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.half.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        self.half.save(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        return self.half.take_freed(), None


def parameters(request: Any) -> dict | None:
    """What the API server said with a request of its own; none for others."""
    return (request.kv_transfer_params or {}).get("baton")


class SchedulerHalf:
    def __init__(self, connector: BatonConnector, channel: Listening):
        self.connector, self.channel, self.block_size = connector, channel, connector.block_size
        self.runs: dict[str, Any] = {}
        self.exports: dict[str, Export] = {}
        # Runs whose KV that came was used, or was not needed.
        self.used: set[str] = set()
        self.meta = Meta()

    def on_new_request(self, request: Any) -> None:
        if ours := parameters(request):
            self.runs[ours["run"]] = request

    def matched(self, request: Any, computed: int) -> int:
        ours = parameters(request)
        if not ours or not ours.get("slots") or ours["run"] in self.used:
            return 0
        return max(0, self._kv_tokens(request, ours) - computed)

    def _kv_tokens(self, request: Any, ours: dict) -> int:
        # The last token is always computed: its logits give the next one.
        return min(ours["computed"], request.num_tokens - 1)

    def allocated(self, request: Any, external: int) -> None:
        ours = parameters(request)
        if not ours or not ours.get("slots") or ours["run"] in self.used:
            return
        run = ours["run"]
        self.used.add(run)
        if external == 0:
            self.channel.send({"op": "unused", "run": run})
            return
        tokens = self._kv_tokens(request, ours)
        blocks = self.connector._kv_cache_manager.get_block_ids(request.request_id)[0]
        first, last = (tokens - external) // self.block_size, -(-tokens // self.block_size)
        self.meta.loads += [(ours["slots"][index], blocks[index]) for index in range(first, last)]
        self.meta.loaded.append(run)

    def step(self, scheduler_output: Any) -> Meta:
        self._hear()
        meta, self.meta = self.meta, Meta()
        meta.tokens = scheduler_output.total_num_scheduled_tokens
        meta.free_blocks = self.connector._kv_cache_manager.block_pool.get_num_free_blocks()
        room = max(1, STEP_BYTES // max(1, self.block_bytes()))
        for run, export in list(self.exports.items()):
            request = self.runs[run]
            if request.num_preemptions != export.preemptions:
                self._gone(run, "it was preempted while it was copied")
                continue
            blocks = None
            # What this step computes is in it too when the worker copies: after the model ran.
            while room > 0 and export.slots and export.following < request.num_computed_tokens // self.block_size:
                blocks = blocks or self.connector._kv_cache_manager.get_block_ids(request.request_id)[0]
                self._copy(meta, export, blocks, self.block_size)
                room -= 1
        return meta

    def block_bytes(self) -> int:
        # Of all layers.
        spec = self.connector._kv_cache_config.kv_cache_groups[0]
        return spec.kv_cache_spec.page_size_bytes * len(spec.layer_names)

    def _copy(self, meta: Meta, export: Export, blocks: list[int], tokens: int) -> None:
        meta.copies.append((export.name, export.following, tokens, blocks[export.following], export.slots.pop()))
        export.following += 1

    def finished(self, request: Any, blocks: list[int]) -> bool:
        """Whether its blocks are needed until they are copied."""
        self._hear()
        ours = parameters(request)
        if not ours or self.runs.pop(ours["run"], None) is None:
            return False
        run, total = ours["run"], len(request.all_token_ids)
        unused = bool(ours.get("slots")) and run not in self.used
        self.used.discard(run)
        export = self.exports.pop(run, None)
        status, computed = request.status.name, min(request.num_computed_tokens, total - 1)
        told = {"op": "ended", "run": run, "status": status, "stop": request.stop_reason, "total": total, "unused": unused}
        told |= {"export": None, "slots": [], "computed": 0}
        told["last"] = list(request.all_token_ids[max(0, total - TOLD_TOKENS) :])
        keeps = False
        if export is not None:
            last = -(-computed // self.block_size)
            whole = export.preemptions == request.num_preemptions and last - export.following <= len(export.slots)
            told["computed"] = computed if whole and computed > 0 else 0
            if told["computed"] and status == "FINISHED_ABORTED":
                keeps = export.following < last
                while export.following < last:
                    self._copy(self.meta, export, blocks, min(self.block_size, computed - export.following * self.block_size))
                if keeps:
                    self.meta.freed.append(request.request_id)
            told |= {"export": export.name, "slots": export.slots}
        self.channel.send(told)
        return keeps

    def _hear(self) -> None:
        for message in self.channel.messages():
            run, name = message["run"], message["id"]
            request, export = self.runs.get(run), self.exports.get(run)
            if export is not None and export.name != name:
                if message["op"] == "end":
                    continue
                self._gone(run, "another copy of it has begun")
                export = None
            if message["op"] == "end":
                if export is not None:
                    self._gone(run, "")
            elif request is None or (export is None and message["from"] is None):
                self.channel.send({"op": "gone", "id": name, "why": "it has ended", "slots": message["slots"]})
            elif export is None:
                self.exports[run] = Export(name, message["from"], message["slots"], request.num_preemptions)
            else:
                export.slots += message["slots"]

    def _gone(self, run: str, why: str) -> None:
        export = self.exports.pop(run)
        self.channel.send({"op": "gone", "id": export.name, "why": why, "slots": export.slots})


def natural(name: str) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


class Layer:
    """One layer's KV by blocks, and where its bytes lie in a block that travels."""

    def __init__(self, tensor: torch.Tensor, num_blocks: int, offset: int):
        shape = list(tensor.shape)
        if num_blocks in shape[:2]:
            self.blocks = tensor.movedim(shape.index(num_blocks), 0)
        elif shape[0] % num_blocks == 0:
            # The kernel's blocks are parts of the manager's.
            self.blocks = tensor.unflatten(0, (num_blocks, -1))
        else:
            compat.refuse([f"a layer's KV has the shape {shape}, in which {num_blocks} blocks are not found"])
        self.shape, self.dtype = list(self.blocks.shape[1:]), tensor.dtype
        self.offset, self.bytes = offset, self.blocks[0].numel() * tensor.element_size()

    def out(self, ids: torch.Tensor, slots: torch.Tensor, staging: torch.Tensor) -> None:
        picked = self.blocks.index_select(0, ids.to(self.blocks.device)).contiguous().cpu()
        self._part(staging).index_copy_(0, slots, picked.view(staging.dtype).reshape(len(ids), -1))

    def into(self, ids: torch.Tensor, slots: torch.Tensor, staging: torch.Tensor) -> None:
        came = self._part(staging).index_select(0, slots).view(self.dtype).reshape(len(ids), *self.shape)
        self.blocks.index_copy_(0, ids.to(self.blocks.device), came.to(self.blocks.device))

    def _part(self, staging: torch.Tensor) -> torch.Tensor:
        word = staging.element_size()
        return staging[:, self.offset // word : (self.offset + self.bytes) // word]


class WorkerHalf:
    def __init__(self, connector: BatonConnector, channel: Listening):
        self.connector, self.channel = connector, channel
        self.layers: list[Layer] = []
        self.block_bytes = 0
        self.staging: Staging | None = None
        self.slots: torch.Tensor | None = None
        self.freed: set[str] = set()
        self.steps, self.began = 0, 0.0
        self.step_s, self.token_s = FIRST_STEP_S, FIRST_STEP_S

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        seen = set()
        for name in sorted(kv_caches, key=natural):
            tensor = kv_caches[name]
            if not isinstance(tensor, torch.Tensor):
                compat.refuse([f"the KV of layer {name} is no tensor"])
            if tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
            self.layers.append(Layer(tensor, self.connector.num_blocks, self.block_bytes))
            self.block_bytes += self.layers[-1].bytes
        kinds = {(tuple(layer.shape), str(layer.dtype)) for layer in self.layers}
        shapes = " ".join(f"{'x'.join(map(str, shape))}:{dtype.removeprefix('torch.')}" for shape, dtype in sorted(kinds))
        self.channel.send({"format": f"vllm-1/layers={len(self.layers)}/{shapes}", "block_bytes": self.block_bytes, "blocks": self.connector.num_blocks})

    def begin(self, meta: Meta) -> None:
        self._meet()
        self.began = time.monotonic()
        expected = max(self.step_s, meta.tokens * self.token_s if meta.tokens >= PREFILL_TOKENS else 0.0)
        self._tell(int(expected * 1e6), meta)

    def load(self, meta: Meta) -> None:
        if not meta.loads:
            return
        slots, blocks = torch.tensor([slot for slot, _ in meta.loads]), torch.tensor([block for _, block in meta.loads])
        for layer in self.layers:
            layer.into(blocks, slots, self.slots)
        for run in meta.loaded:
            self.channel.send({"op": "loaded", "run": run})

    def save(self, meta: Meta) -> None:
        if meta.copies:
            blocks = torch.tensor([block for *_, block, _ in meta.copies])
            slots = torch.tensor([slot for *_, slot in meta.copies])
            for layer in self.layers:
                layer.out(blocks, slots, self.slots)
            staged = [[name, index, tokens, slot] for name, index, tokens, _, slot in meta.copies]
            self.channel.send({"op": "staged", "blocks": staged})
        self.freed |= set(meta.freed)
        self.steps += 1
        took = time.monotonic() - self.began
        self.step_s = took if self.step_s == FIRST_STEP_S else 0.9 * self.step_s + 0.1 * took
        if meta.tokens >= PREFILL_TOKENS:
            each = took / meta.tokens
            self.token_s = each if self.token_s == FIRST_STEP_S else 0.9 * self.token_s + 0.1 * each
        self._tell(0, meta)

    def take_freed(self) -> set[str] | None:
        freed, self.freed = self.freed, set()
        return freed or None

    def _tell(self, predicted_us: int, meta: Meta) -> None:
        if self.staging is not None:
            self.staging.tell(Signs(self.steps, predicted_us, meta.free_blocks, int(self.step_s * 1e6), int(self.token_s * 1e6)))

    def _meet(self) -> None:
        """Takes the staging memory from the API server, which makes it when it is up."""
        if self.staging is None and (came := self.channel.descriptor()) is not None:
            message, descriptor = came
            self.staging = Staging(descriptor, message["slots"], self.block_bytes)
            # Words are copied four times as fast as bytes.
            word = torch.int64 if all(layer.bytes % 8 == 0 for layer in self.layers) else torch.uint8
            self.slots = torch.frombuffer(self.staging.map, dtype=word, offset=HEAD_BYTES).view(message["slots"], -1)
