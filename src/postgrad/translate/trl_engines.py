"""vLLM of TRL's trainers, what corrects for it, and samples ahead of AsyncGRPOTrainer."""

from postgrad.translate import common, places
from postgrad.translate.draft import Draft
from postgrad.translate.images import BUILT_IN, vllm_samples
from postgrad.translate.reader import SourceCommand
from postgrad.translate.rules import Options, decimal, flag

_FILTERS = ("top_p", "top_k", "min_p")

# Their losses read no weights of the sampler. AsyncGRPOTrainer's ratio is to the sampler itself.
_UNCORRECTED = ("online_dpo", "distillation", "gkd", "gmpo", "sdft", "sdpo", "async_grpo")

_COLOCATED = places.EngineOptions(
    tensor_parallel="vllm_tensor_parallel_size", memory="vllm_gpu_memory_utilization",
    sleep="vllm_enable_sleep_mode",
)  # fmt: skip

_SERVED = places.EngineOptions(
    count="data_parallel_size", tensor_parallel="tensor_parallel_size",
    memory="gpu_memory_utilization", eager="enforce_eager",
)  # fmt: skip


def engines(draft: Draft, options: Options, source: SourceCommand, program: str) -> None:
    """vLLM in the trainer's processes ("colocate"), or as `trl vllm-serve` or `vllm serve` start it
    ("server"), where alone AsyncGRPOTrainer samples.
    """
    if not flag(options.take("use_vllm", program == "async_grpo")):
        return
    if not vllm_samples(draft.images):
        draft.miss("use_vllm", True, BUILT_IN)
        for name in [name for name in options.stated if name.startswith("vllm_")]:
            draft.skip(name, options.take(name), "vLLM does not sample")
        return
    usual = "server" if program == "async_grpo" else "colocate"
    if str(options.take("vllm_mode", usual)) == "colocate":
        places.engines(draft, options, _COLOCATED, shared=True, fill=True)
    else:
        served = [command for command in source.beside if command.program == "vllm-serve"]
        if not served:
            draft.notes.append(
                "the source does not start its vLLM server, so one engine of one GPU is assumed: "
                "see cluster.rollout.workers and rollout.vllm.tensor_parallel"
            )
        server = Options(served[0].options if served else {}, {"gpu_memory_utilization": 0.9})
        places.engines(draft, server, _SERVED, shared=False)
        for name in ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size",
                     "vllm_enable_sleep_mode"):  # fmt: skip
            if options.states(name):
                draft.skip(name, options.take(name), "a server has its own, as there")
    regex = options.take("vllm_structured_outputs_regex")
    regex = regex or options.take("vllm_guided_decoding_regex")  # its name before
    draft.put("rollout.regex", regex and str(regex), "needs the extra grammar")
    _vllm_correction(draft, options, program, filtered=bool(regex) or filters(options))


def filters(options: Options) -> bool:
    """Whether samples leave out tokens of low probability."""
    top_p, top_k, min_p = (decimal(options.stated.get(name) or 0.0) for name in _FILTERS)
    return 0.0 < top_p < 1.0 or top_k > 0.0 or min_p > 0.0


def _vllm_correction(draft: Draft, options: Options, program: str, *, filtered: bool) -> None:
    """Weights of the difference between engine and learner."""
    enabled = flag(options.take("vllm_importance_sampling_correction", True))
    mode = str(options.take("vllm_importance_sampling_mode", "sequence_mask"))
    cap = options.take("vllm_importance_sampling_cap", 3.0)
    high = decimal(options.take("vllm_importance_sampling_clip_max", cap))
    low = options.take("vllm_importance_sampling_clip_min")
    if not enabled or program in _UNCORRECTED:
        return
    level, _, constraint = mode.partition("_")
    name = {"truncate": "tis", "mask": "icepop"}.get(constraint)
    if name is None or level not in ("token", "sequence"):
        why = "algorithm.correction truncates or drops weights, of tokens or of sequences"
        draft.miss("vllm_importance_sampling_mode", mode, why)
        return
    stated = options.states("vllm_importance_sampling_mode")
    draft.put("algorithm.correction", name, mode if stated else f"{mode}: TRL's default")
    draft.put("algorithm.correction_level", level if level == "sequence" else None)
    draft.put("algorithm.correction_high", high)
    draft.put("algorithm.correction_with_filters", filtered or None, "as there")
    if name == "icepop" or low:
        draft.put("algorithm.correction_low", decimal(low or 0.0))


def samples_ahead(draft: Draft, options: Options) -> None:
    """[rollout] of AsyncGRPOTrainer, whose ratio is to the sampler."""
    top_p = decimal(options.take("top_p", 1.0))
    draft.put("rollout.top_p", top_p if top_p != 1.0 else None)
    steps = options.number("max_staleness")
    common.samples_ahead(draft, steps, "nothing is dropped; there what is older is", top_p)
    if (most := options.number("max_inflight_tasks", -1)) > 0:
        draft.put("rollout.slots", most, "max_inflight_tasks there, of each engine here")
    elif options.states("max_inflight_tasks"):
        draft.skip("max_inflight_tasks", most, "an engine has as many samples as it has slots")
    tokens = options.number("token_budget", 0)
    if tokens > 0:
        draft.drop("batch.micro_train_batch_size")
        common.micro_tokens(draft, tokens, "token_budget of a device there")
    if tokens > 0 or not options.states("token_budget"):
        budget = "token_budget" if tokens else "the server's max_model_len"
        draft.comments["batch", "rollout_batch_size"] += (
            f". There a micro-batch has as many as fit into {budget}, so that an update's number "
            "of completions changes"
        )
