"""The vLLM engine as the replica wants it: runs of token ids, and their KV by blocks.

The replica (`replica.py`) knows an engine by the methods and fields of `Engine` alone, so that its tests need no vLLM."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .channel import Dialed
from .draw_keys import DRAWS_KEY, draw_key
from .staging import Signs, Slots, Staging
from .wire import Ends, Entry, Layout, Run, Sampling

log = logging.getLogger("vllm.baton")

# Slots that the engine holds for one request's blocks on their way out.
EXPORT_SLOTS = 32
DEFAULT_STAGING_BYTES = 1 << 30
# What decides whether weights are the same is looked at in so many places of each file.
SAMPLES, SAMPLE_BYTES = 64, 1 << 16
# Below it vLLM takes the likeliest token.
GREEDY = 1e-5


class Status(NamedTuple):
    signs: Signs
    waiting: int
    running: int


class Arrived(NamedTuple):
    """KV that came for a run: where its blocks lie, and of how many tokens."""

    slots: list[int]
    computed: int


class Staged(NamedTuple):
    slot: int
    tokens: int


class EndedRun(NamedTuple):
    """What the engine had of a run when it was taken out of its batch."""

    # Tokens behind those that were told.
    extra: list[int]
    # `FINISHED_ABORTED` where nothing but the freeze ended it.
    status: str
    stop: Any
    # Leading tokens of prompt and output whose KV can be had; 0 where none can.
    computed: int


class ExportError(Exception):
    """KV of the run does not come any more."""


class Export(Protocol):
    async def block(self, index: int) -> Staged: ...
    def release(self, slot: int) -> None: ...
    async def freeze(self, told: Callable[[], int]) -> EndedRun: ...
    def close(self) -> None: ...


class Refused(Exception):
    """The engine does not run it; `klass` as in LOST."""

    def __init__(self, klass: str, why: str):
        super().__init__(why)
        self.klass = klass


class Output(NamedTuple):
    entries: list[Entry]
    # Prompt tokens that were found in the cache, with the first output.
    cached: int | None


class Engine(Protocol):
    layout: Layout
    numerics_id: str
    models: list[str]
    ends: Ends
    vocabulary: int
    # Of its KV cache.
    blocks: int
    # Requests and tokens of one step, at most.
    max_running: int
    token_budget: int
    slots: Slots

    def slot(self, index: int) -> memoryview: ...
    def status(self) -> Status: ...
    def start(self, run: str, spec: Run, output: list[int], arrived: Arrived | None, sink: Callable[[str, Any], None]) -> None: ...
    def abort(self, run: str) -> None: ...
    def export(self, run: str, first: int) -> Export: ...


def draws_of(spec: Run, done: int) -> dict | None:
    """What `draws.py` chooses tokens by; none where vLLM's own choice is the same wherever it goes on."""
    sampling = spec.sampling
    if sampling.temperature < GREEDY and not sampling.presence_penalty and not sampling.frequency_penalty:
        return None
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    asked: dict[str, Any] = {name: getattr(sampling, name) for name in names}
    return asked | {"done": done, "key": draw_key(spec.seed, spec.prompt_index, spec.choice_index)}


@dataclass
class Live:
    sink: Callable[[str, Any], None]
    aborted: bool = False
    task: asyncio.Task | None = None
    # No output comes any more.
    over: asyncio.Event = field(default_factory=asyncio.Event)
    # What the scheduler said when it let go of it.
    ended: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class VllmEngine:
    def __init__(self, client: Any, folder: str, models: list[str], staging_bytes: int):
        config = client.vllm_config
        self.client, self.models, self.folder, self.staging_bytes = client, models, folder, staging_bytes
        self.block_size = config.cache_config.block_size
        self.vocabulary = config.model_config.get_vocab_size()
        scheduler = config.scheduler_config
        self.by_priority = scheduler.policy == "priority"
        self.max_running, self.token_budget = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        self.ends = Ends(eos=eos_of(client), length_limit=config.model_config.max_model_len)
        self.runs: dict[str, Live] = {}
        # Slots of KV that came, until the engine has taken it or never will.
        self.arrivals: dict[str, list[int]] = {}
        self.exports: dict[str, VllmExport] = {}
        self.exported = 0
        self.aborts: set[asyncio.Task] = set()

    async def meet(self) -> None:
        """Connects to the engine's processes. They listen between steps only, so that one is computed."""
        self.scheduler, self.worker = Dialed(self.folder, "scheduler"), Dialed(self.folder, "worker")
        await self._warm()
        loop = asyncio.get_running_loop()
        hello = await asyncio.wait_for(loop.run_in_executor(None, self.worker.receive), 60)
        self.blocks = hello["blocks"]
        slots = max(2, min(self.staging_bytes // hello["block_bytes"], self.blocks))
        self.staging = Staging.create(slots, hello["block_bytes"])
        self.slots = Slots(slots)
        self.worker.send_descriptor({"slots": slots}, self.staging.descriptor)
        self.layout = Layout(hello["format"], self.block_size, hello["block_bytes"])
        self.numerics_id = await loop.run_in_executor(None, numerics_of, self.client)
        # With this the worker has the memory when the first blocks move. What vLLM compiles when it is first asked for takes seconds, in
        # which a gateway would think that it hangs.
        await self._warm(logprobs=1, extra_args={DRAWS_KEY: draws_of(Run("", [0], 0, Sampling(top_p=0.9, presence_penalty=0.1)), 0)})
        for channel in (self.scheduler, self.worker):
            channel.socket.setblocking(False)
            loop.add_reader(channel.socket.fileno(), self._hear, channel)

    async def _warm(self, **options: Any) -> None:
        """A prefill of many tokens and a step of decoding."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0, detokenize=False, **options)
        async for _ in self.client.generate({"prompt_token_ids": [0] * 64}, params, f"baton-{os.urandom(8).hex()}"):
            pass

    def slot(self, index: int) -> memoryview:
        return self.staging.slot(index)

    def status(self) -> Status:
        signs = self.staging.told()
        return Status(signs, waiting=0, running=self.client.get_num_unfinished_requests())

    # Runs.

    def start(self, run: str, spec: Run, output: list[int], arrived: Arrived | None, sink: Callable[[str, Any], None]) -> None:
        """`sink` hears an `Output` for what is computed, `Refused` where it does not run, and `None` when no more comes."""
        live = self.runs[run] = Live(sink)
        if arrived is not None:
            self.arrivals[run] = arrived.slots
        live.task = asyncio.ensure_future(self._run(run, live, spec, output, arrived))

    async def _run(self, run: str, live: Live, spec: Run, output: list[int], arrived: Arrived | None) -> None:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        reached, finished, failed = False, False, None
        try:
            params = self._params(run, spec, len(output), arrived)
            prompt = {"prompt_token_ids": spec.prompt + output}
            if spec.salt is not None:
                prompt["cache_salt"] = spec.salt
            priority = spec.priority if self.by_priority else 0
            async for out in self.client.generate(prompt, params, run, priority=priority):
                entries = entries_of(out.outputs[0], spec)
                finished = finished or any(entry.is_finish for entry in entries)
                if entries:
                    live.sink(run, Output(entries, None if reached else out.num_cached_tokens or 0))
                reached = True
                if live.aborted and not out.finished:
                    # When it was told first, the engine may not have had it.
                    await self.client.abort(run)
            if not finished and not live.aborted:
                failed = Refused("busy", "the engine aborted it")
        except Refused as error:
            failed = error
        except (VLLMClientError, ValueError) as error:
            failed = Refused("refused", str(error))
        except EngineDeadError:
            failed = Refused("busy", "the engine is dead")
        except Exception as error:
            log.exception("a run has failed")
            failed = Refused("busy", f"{type(error).__name__}: {error}")
        if not reached and not live.ended.done():
            # The scheduler never heard of it.
            live.ended.set_result(None)
            self._loaded(run)
        live.over.set()
        self._forget(run, live)
        live.sink(run, failed)

    def _forget(self, run: str, live: Live) -> None:
        if live.over.is_set() and live.ended.done():
            self.runs.pop(run, None)

    def _params(self, run: str, spec: Run, done: int, arrived: Arrived | None) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = spec.sampling
        extra: dict[str, Any] = {"kv_transfer_params": {"baton": {"run": run}}}
        if arrived is not None:
            extra["kv_transfer_params"]["baton"] |= {"slots": arrived.slots, "computed": arrived.computed}
        how = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
        if draws := draws_of(spec, done):
            # vLLM looks at what is asked for, and is given the token.
            SamplingParams(**how)
            how, extra[DRAWS_KEY] = {"temperature": 0.0}, draws
        return SamplingParams(
            **how,
            logit_bias={int(token): float(bias) for token, bias in sampling.logit_bias} or None,
            stop_token_ids=list(sampling.stop_token_ids) or None,
            ignore_eos=sampling.ignore_eos,
            min_tokens=max(0, sampling.min_tokens - done),
            max_tokens=None if sampling.max_tokens is None else sampling.max_tokens - done,
            logprobs=sampling.logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra,
        )

    def abort(self, run: str) -> None:
        """It computes no more."""
        live = self.runs.get(run)
        if live is not None and not live.aborted:
            live.aborted = True
            task = asyncio.ensure_future(self.client.abort(run))
            self.aborts.add(task)
            task.add_done_callback(self.aborts.discard)

    # KV.

    def export(self, run: str, first: int) -> VllmExport:
        if run not in self.runs:
            raise ExportError("it has ended")
        self.exported += 1
        name = f"{run}/{self.exported}"
        export = self.exports[name] = VllmExport(self, name, run, self.runs[run], first)
        export.grant()
        return export

    def _hear(self, channel: Dialed) -> None:
        while True:
            try:
                message = channel.receive()
            except BlockingIOError:
                return
            except (EOFError, OSError) as error:
                asyncio.get_running_loop().remove_reader(channel.socket.fileno())
                log.error("a process of the engine does not answer any more: %s", error)
                return
            operation = message["op"]
            if operation == "staged":
                for name, index, tokens, slot in message["blocks"]:
                    self.exports[name].came(index, Staged(slot, tokens))
            elif operation in ("loaded", "unused"):
                self._loaded(message["run"])
            elif operation == "gone":
                self.exports[message["id"]].gone(message["slots"], message["why"])
            else:
                self._ended(message)

    def _loaded(self, run: str) -> None:
        self.slots.give_back(self.arrivals.pop(run, []))

    def _ended(self, message: dict) -> None:
        if message["unused"]:
            self._loaded(message["run"])
        if message["export"] is not None:
            self.exports[message["export"]].returned(message["slots"])
        live = self.runs.get(message["run"])
        if live is not None and not live.ended.done():
            live.ended.set_result(message)
            self._forget(message["run"], live)


class VllmExport:
    """Blocks of one run on their way out. The scheduler has slots for the next ones, the staging memory those that were copied."""

    def __init__(self, engine: VllmEngine, name: str, run: str, live: Live, first: int):
        self.engine, self.name, self.run, self.live = engine, name, run, live
        self.first: int | None = first
        # Slots that the scheduler or the worker has.
        self.granted: set[int] = set()
        self.blocks: dict[int, Staged] = {}
        # Taken by who sends them.
        self.lent: set[int] = set()
        self.changed = asyncio.Event()
        self.failed: str | None = None
        self.closed = False

    def grant(self) -> None:
        """Lets the scheduler have more slots, if there are any."""
        wanted = min(EXPORT_SLOTS - len(self.granted) - len(self.blocks) - len(self.lent), len(self.engine.slots.free))
        if wanted <= 0 or self.closed:
            return
        slots = self.engine.slots.take(wanted)
        self.granted.update(slots)
        self._tell({"op": "export", "run": self.run, "id": self.name, "from": self.first, "slots": slots})
        # What comes later belongs to a copy that has begun.
        self.first = None

    async def block(self, index: int) -> Staged:
        while index not in self.blocks:
            if self.failed is not None:
                raise ExportError(self.failed)
            self.changed.clear()
            await self.changed.wait()
        staged = self.blocks.pop(index)
        self.lent.add(staged.slot)
        return staged

    def release(self, slot: int) -> None:
        """What lies there has been sent."""
        if slot in self.lent:
            self.lent.discard(slot)
            self.engine.slots.give_back([slot])
            if self.failed is None and not self.live.aborted:
                self.grant()

    async def freeze(self, told: Callable[[], int]) -> EndedRun:
        """Takes the run out of the batch for good. `told`: tokens of prompt and output that were told when no more come."""
        self.engine.abort(self.run)
        await self.live.over.wait()
        message = await self.live.ended
        if message is None:
            raise ExportError("it has ended")
        extra = message["total"] - told()
        if not 0 <= extra <= len(message["last"]):
            raise ExportError(f"the engine had {message['total']} tokens, and {told()} were told")
        return EndedRun(message["last"][len(message["last"]) - extra :], message["status"], message["stop"], message["computed"])

    def close(self) -> None:
        """No block of it is wanted any more."""
        if self.closed:
            return
        self.closed = True
        self.engine.slots.give_back([staged.slot for staged in self.blocks.values()])
        self.engine.slots.give_back(list(self.lent))
        self.blocks.clear()
        self.lent.clear()
        if self.granted:
            self._tell({"op": "end", "run": self.run, "id": self.name, "slots": []})
        self._settle()

    # From the engine's processes.

    def came(self, index: int, staged: Staged) -> None:
        self.granted.discard(staged.slot)
        if self.closed:
            self.engine.slots.give_back([staged.slot])
            return self._settle()
        self.blocks[index] = staged
        self.changed.set()

    def gone(self, slots: list[int], why: str) -> None:
        self.failed = why or "it is not copied any more"
        self.changed.set()
        self.returned(slots)

    def returned(self, slots: list[int]) -> None:
        self.granted.difference_update(slots)
        self.engine.slots.give_back(slots)
        self._settle()

    def _settle(self) -> None:
        if self.closed and not self.granted:
            self.engine.exports.pop(self.name, None)

    def _tell(self, message: dict) -> None:
        try:
            self.engine.scheduler.send(message)
        except OSError as error:
            # Nothing is copied then, and who waits is told.
            self.failed = f"the engine's scheduler hears nothing: {error}"
            self.changed.set()


def entries_of(out: Any, spec: Run) -> list[Entry]:
    """Of one `CompletionOutput` of new tokens."""
    wanted, entries = spec.sampling.logprobs, []
    for place, token in enumerate(out.token_ids):
        logprobs = None
        if wanted is not None and out.logprobs is not None:
            at = out.logprobs[place]
            likeliest = sorted((known.rank, other, known.logprob) for other, known in at.items() if known.rank is not None)
            logprobs = [at[token].logprob, [[other, logprob] for _, other, logprob in likeliest[:wanted]]]
        entries.append(Entry(token=token, logprobs=logprobs))
    if out.finish_reason == "length":
        entries.append(Entry(finish="length"))
    elif out.finish_reason == "stop":
        entries.append(stopped_by(out.stop_reason, spec))
    return entries


def stopped_by(token: Any, spec: Run | None) -> Entry:
    # Of the model's ends vLLM names all but the first.
    asked = isinstance(token, int) and (spec is None or token in spec.sampling.stop_token_ids)
    return Entry(finish=("stop", token) if asked else "eos")


def eos_of(client: Any) -> list[int]:
    """The model's end-of-sequence tokens: of its tokenizer and of its generation config, as vLLM takes them."""
    config = client.model_config
    ends = set()
    tokenizer = client.get_tokenizer() if hasattr(client, "get_tokenizer") else None
    if getattr(tokenizer, "eos_token_id", None) is not None:
        ends.add(tokenizer.eos_token_id)
    more = config.try_get_generation_config().get("eos_token_id") or []
    ends.update([more] if isinstance(more, int) else more)
    return sorted(ends)


def numerics_of(client: Any) -> str:
    """Names what decides the bits: the engine, its kernels, the model and its weights, and the types of weights, activations and KV."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    config = client.vllm_config
    model = config.model_config
    parts = [
        f"vllm-{vllm.__version__}",
        f"torch-{torch.__version__}",
        f"{current_platform.device_name}",
        kernels(current_platform, torch),
        str(model.dtype).removeprefix("torch."),
        f"kv-{config.cache_config.cache_dtype}",
        f"block-{config.cache_config.block_size}",
        f"quantization-{model.quantization}",
        "eager" if model.enforce_eager else f"compiled-{config.compilation_config.mode}",
        f"logprobs-{model.logprobs_mode}",
        f"weights-{weights_of(model)}",
    ]
    return " ".join(str(part) for part in parts)


def kernels(platform: Any, torch: Any) -> str:
    if platform.is_cpu():
        # The kernels that a processor gets, and in how many threads a sum is split.
        return f"{torch.backends.cpu.get_cpu_capability()}-threads-{os.environ.get('OMP_NUM_THREADS', os.cpu_count())}"
    return platform.get_device_name().replace(" ", "-")


def weights_of(model: Any) -> str:
    """A digest of the weights' files, looked at in places; of a hub's model its name and revision where there is no folder."""
    folder = pathlib.Path(model.model)
    digest = hashlib.sha256(str(model.hf_config.to_json_string() if hasattr(model.hf_config, "to_json_string") else "").encode())
    if not folder.is_dir():
        digest.update(f"{model.model} {model.revision}".encode())
        return digest.hexdigest()[:16]
    digest = hashlib.sha256()
    names = ["config.json", *sorted(path.name for suffix in ("*.safetensors", "*.bin", "*.gguf") for path in folder.glob(suffix))]
    for name in names:
        path = folder / name
        if not path.exists():
            continue
        size = path.stat().st_size
        digest.update(f"{name} {size} ".encode())
        with open(path, "rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // max(1, SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
