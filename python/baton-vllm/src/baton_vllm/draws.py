"""Random draws and penalties that go on elsewhere as they would have here.

vLLM draws from a generator that begins anew with each request, and counts what a request goes on from as its prompt: a moved answer would
differ. So for requests of the replica that draw, or have presence or frequency penalties, this logits processor (vLLM's public interface,
`--logits-processors`) chooses the token itself, by (seed, prompt index, choice index, output index), and leaves only that one to vLLM. All of
a row's arithmetic is its own, whatever shares the batch."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from .draw_keys import DRAWS_KEY, uniform


class Row:
    """One request in the batch."""

    def __init__(self, asked: dict, prompt: list[int], output: list[int], vocabulary: int, device: torch.device):
        self.asked, self.output, self.device = asked, output, device
        # Of the prompt, the last ones are output of before.
        self.done, self.taken = asked["done"], 0
        self.counts = self.seen = None
        former = prompt[len(prompt) - self.done :]
        if asked["presence_penalty"] or asked["frequency_penalty"]:
            self.counts = torch.zeros(vocabulary, device=device)
            self._count(former)
        if asked["repetition_penalty"] != 1.0:
            self.seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._see(prompt)

    def _count(self, tokens: list[int]) -> None:
        if self.counts is not None and tokens:
            at = torch.tensor(tokens, device=self.device)
            self.counts.index_put_((at,), torch.ones(len(tokens), device=self.device), accumulate=True)

    def _see(self, tokens: list[int]) -> None:
        if self.seen is not None and tokens:
            self.seen[torch.tensor(tokens, device=self.device)] = True

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token, of the row's logits."""
        fresh = self.output[self.taken :]
        self.taken += len(fresh)
        self._count(fresh)
        self._see(fresh)
        logits = self._penalised(logits)
        temperature = self.asked["temperature"]
        if temperature < 1e-5:
            return logits.argmax()
        probabilities = (logits.double() / temperature).softmax(dim=-1)
        draw = uniform(self.asked["key"], self.done + len(self.output))
        if self.asked["top_k"] <= 0 and self.asked["top_p"] >= 1.0 and self.asked["min_p"] <= 0.0:
            return pick(probabilities, draw)
        ordered, tokens = probabilities.sort(descending=True, stable=True)
        return tokens[pick(self._kept(ordered), draw)]

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        # As vLLM: repetition scales towards unlikely, the others subtract.
        if self.seen is not None:
            penalty = self.asked["repetition_penalty"]
            scaled = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(self.seen, scaled, logits)
        if self.counts is not None:
            logits = logits - self.asked["frequency_penalty"] * self.counts - self.asked["presence_penalty"] * (self.counts > 0)
        return logits

    def _kept(self, ordered: torch.Tensor) -> torch.Tensor:
        """Of probabilities, likeliest first, those that may be drawn; the likeliest always may."""
        kept = ordered
        if self.asked["min_p"] > 0.0:
            kept = kept * (kept >= self.asked["min_p"] * kept[0])
        if self.asked["top_k"] > 0:
            kept = kept * (torch.arange(len(kept), device=kept.device) < self.asked["top_k"])
        if self.asked["top_p"] < 1.0:
            kept = kept / kept.sum()
            before = kept.cumsum(0) - kept
            allowed = before < self.asked["top_p"]
            allowed[0] = True
            kept = kept * allowed
        return kept


def pick(weights: torch.Tensor, draw: float) -> torch.Tensor:
    """Where the cumulated weights pass a share of their sum."""
    cumulated = weights.cumsum(0)
    place = torch.searchsorted(cumulated, cumulated[-1] * draw, right=True)
    # Rounding may leave the draw behind the last one that has weight.
    last = torch.searchsorted(cumulated, cumulated[-1])
    return torch.minimum(place, last)


class KeyedDraws(LogitsProcessor):
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self.device = device
        self.rows: dict[int, Row] = {}
        self.vocabulary = vllm_config.model_config.get_vocab_size()

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self.rows.pop(index, None)
            if asked := (params.extra_args or {}).get(DRAWS_KEY):
                self.rows[index] = Row(asked, prompt or [], output, self.vocabulary, self.device)
        for one, other, direction in batch_update.moved:
            moved, replaced = self.rows.pop(one, None), self.rows.pop(other, None)
            if moved is not None:
                self.rows[other] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self.rows[one] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, row in self.rows.items():
            if index < len(logits):
                # A vocabulary is padded at times, and no token is there.
                token = row.choose(logits[index, : self.vocabulary])
                logits[index].fill_(float("-inf"))
                logits[index, token] = 0.0
        return logits
