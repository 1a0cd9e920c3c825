"""What vLLM is asked for a request, and what the samples that it returns say."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import nn

from postgrad.core.errors import Diverged, RunError, UsageError
from postgrad.core.records import Experts, FinishReason, PlacedImage
from postgrad.core.seeds import integer
from postgrad.models.attention import layers_of
from postgrad.models.image_reader import ImageReader
from postgrad.models.settings import LoraSettings
from postgrad.rollout.engine import Completion, Request, Written
from postgrad.rollout.grammar import Grammars, lark_of
from postgrad.rollout.vllm.protocol import SampledTokens

MARGIN = 4  # tokens decoded before a stop string


@dataclass(frozen=True, slots=True)
class SampledModel:
    """The model that vLLM samples from, without its weights, as the controller needs it."""

    skeleton: nn.Module  # on the meta device: names and shapes of the parameters
    tokenizer: Any
    eos: tuple[int, ...]  # token ids that end a response
    dtype: torch.dtype  # what the engine computes in
    max_len: int  # tokens of the longest sequence, prompt and response
    adapter: LoraSettings | None = None  # that it samples with; None: its weights are whole
    reader: ImageReader | None = None  # of a model that reads images
    routed: tuple[int, ...] = ()  # layers whose experts are recorded with each sample

    def shown(self, folder: Path, images: Sequence[tuple[PlacedImage, ...]]) -> dict[str, Any]:
        """What a message says of the images of its prompts; their arrays go to a file in `folder`,
        each once, and never as an object that would be unpickled. {} where no prompt has any.
        """
        if not any(images):
            return {}
        if self.reader is None:
            raise UsageError("a prompt has an image, and the model that vLLM samples reads none")
        digests = {image.digest for of_prompt in images for image in of_prompt}
        arrays = {
            f"{digest}/{name}": np.ascontiguousarray(array)
            for digest in sorted(digests)
            for name, array in self.reader.pixels(digest).items()
        }
        with NamedTemporaryFile(dir=folder, suffix=".safetensors", delete=False) as file:
            save_file(arrays, file.name)
        named = [
            [{"digest": image.digest, "runs": image.runs} for image in of_prompt]
            for of_prompt in images
        ]
        return {"pixels": file.name, "images": named}

    def sampling(self, request: Request) -> dict[str, Any]:
        """A request's settings as keyword arguments of vLLM's SamplingParams, and of its
        StructuredOutputsParams.

        Where a grammar may end vLLM allows the tokenizer's end of sequence alone: other tokens that
        end an answer are made a part of the grammar.
        """
        sampling, grammar = request.sampling, request.grammar
        ends = [token for token in self.eos if token != self.tokenizer.eos_token_id]
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "max_tokens": request.new_tokens,
            "stop_token_ids": list(self.eos),
            **({"structured_outputs": {"grammar": lark_of(grammar, ends)}} if grammar else {}),
        }

    def completion(
        self, request: Request, sample: int, sampled: SampledTokens, grammars: Grammars
    ) -> Completion:
        """A sample that has ended. Raises RunError as `turn` does, and for one that does not follow
        its grammar.

        At a dead end vLLM goes on with the end of sequence, which is taken away here.
        """
        turn = self.turn(request, sample, sampled)
        reason: FinishReason = "stop" if sampled.stopped else "length"
        if (end := self.end_over_cut(request, turn)) is not None:
            turn, reason = turn.first(end), "stop"
        if (grammar := request.grammar) is not None:
            allowed = grammars.followed(grammar, turn.token_ids)
            if allowed < len(turn.token_ids):
                turn, reason = turn.first(allowed), "dead_end"
        return Completion(
            ticket=request.ticket,
            sample=sample,
            turn=request.turn,
            token_ids=turn.token_ids,
            logprobs=turn.logprobs,
            finish_reason=reason,
            versions=turn.versions,
            text=self.tokenizer.decode(turn.token_ids.tolist(), skip_special_tokens=True),
            experts=turn.experts,
        )

    def turn(self, request: Request, sample: int, sampled: SampledTokens) -> Written:
        """The turn of a sample from its start. Raises RunError where a logprob is not finite, and
        for experts that are not those of its tokens.
        """
        turn = request.turn_with(
            np.array(sampled.tokens, np.int32),
            np.array(sampled.logprobs, np.float32),
            [(version, tokens) for version, tokens in sampled.versions],
            self._experts(request, sampled) if self.routed else None,
        )
        broken = np.flatnonzero(~np.isfinite(turn.logprobs))
        if len(broken):
            raise Diverged(
                f"the policy's logits are not finite (version {turn.versions[-1][0]}, ticket "
                f"{request.ticket}, sample {sample}, token {broken[0]}): the weights have "
                "diverged; go back to a checkpoint with a lower learner.lr"
            )
        return turn

    def _experts(self, request: Request, sampled: SampledTokens) -> Experts | None:
        """[P + R, routed layers, k] of the prefix and the new tokens, as in a Completion."""
        if not sampled.tokens:  # it was cut before its first token
            return None if request.written is None else request.written.experts
        computed = len(request.prefix) + len(sampled.tokens) - 1
        numbers = np.frombuffer(base64.b64decode(sampled.experts), np.uint16)
        layers = len(layers_of(self.skeleton))
        if not numbers.size or numbers.size % (computed * layers):
            raise RunError(
                f"vLLM gave {numbers.size} numbers of experts for {computed} tokens in {layers} "
                f"layers (ticket {request.ticket}): this version of vLLM records them otherwise; "
                'use rollout.router_replay = "old"'
            )
        chosen = numbers.reshape(computed, layers, -1)[:, list(self.routed)].astype(np.int16)
        return np.concatenate([chosen, np.full_like(chosen[:1], -1)])

    def end_over_cut(self, request: Request, turn: Written) -> int | None:
        """How many tokens of a turn that was cut there are up to a stop string that began before
        the cut; vLLM looks for it in what it writes itself. None: there is none.
        """
        stops, position = request.sampling.stop, request.position
        if not position or not stops:
            return None
        # A token that shows has at least one byte; a few more, as the first may decode otherwise.
        reach = max(len(stop.encode()) for stop in stops) + MARGIN
        for end in range(position + 1, min(position + reach, len(turn.token_ids)) + 1):
            tail = turn.token_ids[max(0, end - reach) : end].tolist()
            text = self.tokenizer.decode(tail, skip_special_tokens=False)
            if any(stop in text for stop in stops):
                return end
        return None


def seed_of(request: Request, sample: int) -> int:
    """Of a sample that goes on too: its position is one of the counters."""
    counters = (request.ticket, sample, request.turn)
    going_on = (request.position,) if request.position else ()
    return integer(request.seed, "vllm", *counters, *going_on)
