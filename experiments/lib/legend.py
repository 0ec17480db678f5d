"""Headers and meanings of the fields of results.json, one table of both for all experiments."""

from collections.abc import Iterable
from typing import NamedTuple


class Field(NamedTuple):
    """A field of a row: its header in words, with the unit, and its meaning in a line."""

    header: str
    meaning: str


_FIELDS = {
    # what was run
    "table": Field("table", "the table that the row belongs to, where a file holds several"),
    "task": Field("task", "the task whose sources and references are used"),
    "machine": Field("machine", "the machine whose bandwidth and arithmetic speed are assumed"),
    "measured_on": Field("measured on", "the machine of the measured values"),
    "device": Field("device", "the device that was checked"),
    "target": Field("target", "the model whose distribution the output has"),
    "draft": Field("draft", "the draft model; none where the drafter needs no model"),
    "temperature": Field("temperature", "0 is greedy"),
    "batch_size": Field("batch size", "B, rows decoded together"),
    "rule": Field("acceptance rule", "the rule that accepts or rejects drafts above temperature 0"),
    "dtype": Field("dtype", "dtype of the computation"),
    "seed": Field("seed", "seed of all random draws"),
    "num_draft": Field(
        "K or drafter",
        "K, drafted tokens per round, or a drafter as --num_draft names it; 0 is autoregressive decoding",
    ),
    "num_examples": Field("sources", "number of sources that are not blank; quality is over these"),
    "num_tokens": Field("tokens emitted", "tokens emitted for all sources together"),
    "num_timed": Field("sources timed", "number of sources that were timed"),
    "draft_parameters": Field("drafter's parameters", "number of parameters that the drafter itself holds"),
    "draft_bytes": Field("drafter's bytes", "bytes of these parameters"),
    "costs": Field(
        "cost of a round by length",
        "an adaptive drafter's cost of a round at each draft length, in decoding steps",
    ),
    # the outputs
    "target_entropy": Field(
        "target entropy (nats per token)", "mean entropy of the target's distributions along its own outputs"
    ),
    "copied_share": Field("copied share", "share of output tokens that also occur in the source"),
    "alpha": Field(
        "alpha",
        "acceptance rate: accepted over tested drafts (up to the first rejection); token-wise rule on chains",
    ),
    "accepted_per_round": Field("accepted drafts per target call", "mean accepted drafts per target call"),
    "tokens_per_target_call": Field("tau (tokens per target call)", "mean tokens per target call"),
    "accepted_by_position": Field(
        "accepted by position",
        "share of target calls that accepted a draft at position 1, 2, ...; the sum is accepted drafts",
    ),
    "tau_by_position": Field(
        "tau by position", "tau that the acceptance rate of each position in the draft predicts"
    ),
    "identical_to_target": Field(
        "identical to autoregressive decoding",
        "greedy outputs with the same tokens as autoregressive decoding; sampled outputs differ by chance, "
        "and `losslessness` tests their distribution",
    ),
    "num_near_ties": Field(
        "near ties",
        "differing outputs whose first difference is a near tie: the two largest logits are within 1e-4",
    ),
    "quality": Field(
        "quality",
        "BLEU or ROUGE-Lsum of the outputs, as `metric` states; above temperature 0 the two arms are "
        "different samples, so their qualities differ by chance",
    ),
    "rouge1": Field("ROUGE-1", "ROUGE-1 of the outputs"),
    "rouge2": Field("ROUGE-2", "ROUGE-2 of the outputs"),
    "metric": Field("metric", "the metric of the quality, with its signature"),
    "quality_autoregressive": Field("quality, autoregressive", "quality of autoregressive decoding"),
    # time, measured
    "ms_per_token_autoregressive": Field(
        "autoregressive (ms per token)",
        "time of autoregressive decoding, encoder time excluded: median [quartiles] of the turns",
    ),
    "ms_per_token_speculative": Field(
        "speculative (ms per token)",
        "time of speculative decoding, encoder time excluded: median [quartiles] of the turns",
    ),
    "speedup": Field(
        "speed-up",
        "time of autoregressive over speculative decoding, encoder time excluded: median of the turns",
    ),
    "speedup_low": Field("speed-up, lower quartile", "lower quartile of the turns"),
    "speedup_high": Field("speed-up, upper quartile", "upper quartile of the turns"),
    "speedup_end_to_end": Field("speed-up, end to end", "speed-up with encoder time included"),
    "prefill_share": Field(
        "prefill share, speculative", "share of the time of speculative decoding in encoder and prefill"
    ),
    "prefill_share_autoregressive": Field(
        "prefill share, autoregressive", "share of the time of autoregressive decoding in encoder and prefill"
    ),
    "share_slower": Field("slower requests", "share of requests that were slower than autoregressive"),
    **{
        f"latency_p{p}_s{suffix}": Field(
            f"p{p} latency, {arm} (s)", f"{p}th percentile of a request's time in {arm} decoding"
        )
        for p in (50, 90, 99)
        for suffix, arm in (("", "speculative"), ("_autoregressive", "autoregressive"))
    },
    "seconds_of_this_run": Field("this run (s)", "decoding time of this run, compilation included"),
    "num_tokens_of_this_run": Field(
        "tokens of this run", "tokens that this run emitted; the others were in the journal"
    ),
    "compile_s": Field("compilation (s)", "time of compilation"),
    "compile_s_autoregressive": Field(
        "first call, autoregressive (s)", "time of the first autoregressive call, compilation included"
    ),
    "compile_s_speculative": Field(
        "first call, speculative (s)", "time of the first speculative call, compilation included"
    ),
    # parts of a round
    "c": Field("c (draft step)", "time of a draft step in decoding steps (target calls on one token)"),
    "draft_cost": Field("K c (draft)", "time of all draft steps of a round, in decoding steps"),
    "verify_cost": Field("v (target call)", "time of a target call on K + 1 tokens, in decoding steps"),
    "overhead": Field(
        "o (overhead)",
        "time of the rest of a round, in decoding steps; as a difference of timings it can be below 0",
    ),
    "tokens_per_round_timed": Field(
        "tau of timed sources", "tau of the timed sources, over that of autoregressive decoding"
    ),
    "predicted_speedup": Field("predicted speed-up", "tau of the timed sources / (v + K c + o)"),
    "measured_over_predicted": Field("measured / predicted", "measured over predicted speed-up"),
    "predicted_speedup_iid": Field(
        "predicted speed-up, iid",
        "the paper's formula with the measured alpha, c and v: it assumes independent acceptances, so it is "
        "less exact than the prediction from tau",
    ),
    # on paper
    "gigabytes_target": Field("target's weights (GB)", "weights that a decoder call of the target reads"),
    "gigabytes_draft": Field("draft's weights (GB)", "weights that a decoder call of the draft reads"),
    "megabytes_cache": Field("self-attention cache (MB)", "keys and values of decoded tokens that it reads"),
    "megabytes_cross": Field("cross-attention cache (MB)", "keys and values of the source that it reads"),
    "decoding_step_ms": Field(
        "decoding step (ms)", "time on paper: bytes over bandwidth, or operations over arithmetic speed"
    ),
    "decoding_step_ms_measured": Field(
        "decoding step, measured (ms)", "time per token of autoregressive decoding"
    ),
    "gigabytes_per_second_reached": Field(
        "bandwidth reached (GB/s)", "bytes that a decoding step reads, over its measured time"
    ),
    "verify_cost_measured": Field("v(7), measured", "v of a target call on eight tokens, measured"),
    "verify_cost_on_paper": Field("v(7), on paper", "v if the time of a call does not depend on its tokens"),
    "c_with_launches": Field("c with launches", "c if each kernel takes --launch_us at least"),
    "predicted_speedup_with_launches": Field(
        "predicted speed-up with launches", "predicted speed-up if each kernel takes --launch_us at least"
    ),
    "paper_measured": Field("measured in the paper", "speed-up that the paper measured"),
    "printed": Field("expected speed-up, printed", "expected speed-up that the paper prints"),
    "recomputed": Field("expected speed-up, recomputed", "expected speed-up by the paper's formula"),
    "range": Field("range", "expected speed-up over the values of alpha and c that round to those printed"),
    "printed_operations": Field(
        "operations, printed", "operations of speculative over autoregressive decoding that the paper prints"
    ),
    "operations": Field("operations, recomputed", "the ratio of operations by the paper's formula"),
    "printed_tokens": Field(
        "tau, printed", "speed-up at c = 0 that the paper prints, which is tokens per target call"
    ),
    "tokens": Field("tau, recomputed", "tokens per target call by the paper's formula"),
    "best_num_draft": Field("best K", "K of the largest expected speed-up at this alpha and c"),
    "best_speedup": Field("speed-up at the best K", "expected speed-up at that K"),
    "best K (speed-up) at alpha": Field(
        "best K (speed-up) at alpha",
        "alpha; the columns beside it hold the best K and its speed-up at each c",
    ),
    # choose_draft
    "million_params": Field("parameters (millions)", "number of parameters of the draft"),
    "expected_alpha": Field(
        "expected alpha", "mean probability of acceptance along the target's own outputs: sum of min(p, q)"
    ),
    "predicted_by_num_draft": Field(
        "predicted speed-up by K", "predicted speed-up at each K that was considered"
    ),
    "tau": Field("expected tau", "expected tokens per target call, from the probabilities of acceptance"),
    "pays": Field("pays", "whether the predicted speed-up is above 1"),
    "target_mib": Field("target (MiB)", "memory of the target"),
    "draft_mib": Field("draft (MiB)", "memory of the draft"),
    "caches_mib": Field("caches (MiB)", "memory of the caches of both"),
    "logits_mib": Field("logits (MiB)", "memory of the logits of both"),
    "shared_encoder_saves_mib": Field(
        "saved by a shared encoder (MiB)", "memory that the draft saves if it shares the target's encoder"
    ),
    "shared_embedding_saves_mib": Field(
        "saved by a shared embedding (MiB)", "memory that the draft saves if it shares the target's embedding"
    ),
    # walltime
    "num_new": Field(
        "tokens of the call", "N, tokens of a target call; v (target call) of this row is v(N - 1)"
    ),
    "forced_alpha": Field("forced alpha", "probability of acceptance that was forced"),
    "predicted_speedup_paper": Field(
        "predicted speed-up, paper", "the paper's formula: acceptances independent, v = 1, o = 0"
    ),
    "weights_gb_per_s": Field(
        "weights read (GB/s)", "bytes of weights that a decoding step reads, over its measured time"
    ),
    "share_of_stated_bandwidth": Field(
        "share of stated bandwidth", "that speed over the bandwidth that the device's maker states"
    ),
    "peak_memory_bytes_so_far": Field(
        "peak memory so far (bytes)", "the most that the device has held so far, earlier rows included"
    ),
    # throughput
    "num_refilled": Field("rows refilled together", "finished rows that are refilled together"),
    "tokens_per_second_fixed": Field(
        "fixed batches (tokens/s)", "batches of fixed rows: median [quartiles] of the turns"
    ),
    "tokens_per_second_refilled": Field(
        "continuous batching (tokens/s)", "rows refilled as they finish: median [quartiles] of the turns"
    ),
    "identical_to_alone": Field(
        "identical to decoding alone", "outputs with the same tokens as the source decoded at batch 1"
    ),
    # peers
    "model": Field("model", "the models of the comparison"),
    "arm": Field("arm", "the library and its settings; in `distill` the objective and its sequences"),
    "ms_per_token": Field("time (ms per token)", "median [quartiles] of the turns"),
    "time_over_autoregressive": Field(
        "time over autoregressive", "time over that of autoregressive decoding with specjax in the same turn"
    ),
    "same_rows": Field("identical outputs", "outputs with the same tokens as autoregressive decoding"),
    "same_tokens": Field("identical tokens", "tokens before the first difference of each output"),
    "weights_read_mb": Field("weights read (MB per token)", "weights that each token reads at least"),
    "read_gb_per_s": Field(
        "memory bandwidth (GB/s)", "speed at which an array larger than the caches is read on this machine"
    ),
    "read_gb_per_s_at_that_size": Field(
        "bandwidth at that size (GB/s)", "speed at which an array as large as these weights is read"
    ),
    "floor_ms": Field("floor (ms per token)", "time in which these weights are read: a token takes no less"),
    "floor_ms_at_that_size": Field(
        "floor at that size (ms per token)", "the floor at the speed of an array as large as these weights"
    ),
    "autoregressive_loop_ms_per_token": Field(
        "autoregressive loop (ms per token)", "autoregressive decoding with specjax, encoder time excluded"
    ),
    "over_floor": Field("loop / floor", "time of the autoregressive loop over the floor"),
    # round_breakdown
    "round_ms": Field("round (ms)", "time of a whole round"),
    "draft_network_ms": Field("draft network (ms)", "the draft's network"),
    "target_network_ms": Field("target network (ms)", "the target's network"),
    "choose_drafts_ms": Field(
        "choosing drafts (ms)", "drafting without the network: distributions and draws"
    ),
    "accept_ms": Field("accepting (ms)", "the target's distributions and the acceptance rule"),
    "commit_ms": Field("committing (ms)", "everything after the acceptance rule"),
    "interaction_ms": Field(
        "interaction (ms)", "the whole round less the sum of its parts, which run faster by themselves"
    ),
    "not_networks": Field(
        "share outside the networks", "share of the round in choosing drafts, accepting and committing"
    ),
    "all_but_networks": Field(
        "share outside the networks, with interaction", "the same share with the interaction added"
    ),
    # compile
    "topology": Field("devices", "the devices that the program was compiled for"),
    "mesh": Field("mesh (data x model)", "devices along the data axis and along the model axis"),
    "drafter": Field("drafter", "the draft with its K, or a drafter as --num_draft names it"),
    "program": Field("program", "the loop that was inspected: sampled or greedy"),
    "arguments_gib": Field("arguments (GiB)", "memory per device of weights and inputs"),
    "temporaries_gib": Field("temporaries (GiB)", "memory per device that the program allocates besides"),
    "peak_gib": Field("peak memory (GiB)", "the largest memory per device at any time"),
    "usable_gib": Field("usable memory (GiB)", "memory per device that a program may use"),
    "fits": Field("fits", "whether the peak is at most the usable memory"),
    "largest_batch": Field(
        "largest batch that fits", "rows that fit by the line through the peaks of the batch sizes compiled"
    ),
    "collectives_in_draft": Field("collectives while drafting", "exchanges between devices in a draft step"),
    "collectives_in_verify": Field(
        "collectives in the rest of a round", "exchanges between devices in the rest of a round"
    ),
    "large_copies": Field("large copies per round", "copies of more than a mebibyte in a round"),
    "custom_calls": Field("custom calls per round", "hand-written kernels in a round"),
    "instructions_per_draft_step": Field(
        "instructions per draft step", "instructions of the compiled program in a draft step"
    ),
    "instructions_per_round": Field(
        "instructions per round", "instructions of the compiled program in a round"
    ),
    "kernels_per_draft_step": Field("kernels per draft step", "kernels that a GPU launches in a draft step"),
    "kernels_per_round": Field("kernels per round", "kernels that a GPU launches in a round"),
    # device_check
    "same_as_on_cpu": Field("identical to the CPU", "outputs with the same tokens as on the CPU"),
    "differ_at_a_near_tie": Field(
        "near ties", "differing outputs whose first difference is a near tie: logits within 1e-4"
    ),
    "differences": Field("differences", "each differing output: its row, position and top-2 margin"),
    "rounds_profiled": Field("rounds profiled", "rounds that ran under the profiler"),
    "kernels_launched_per_round": Field("kernels launched per round", "kernels that the profiler counted"),
    "kernels_compiled_per_round": Field("kernels compiled per round", "kernels of the compiled program"),
    "peak_gib_measured": Field("peak memory, measured (GiB)", "the largest memory that the device reports"),
    "peak_gib_compiled": Field("peak memory, compiled (GiB)", "the largest memory that the compiler reports"),
    # distill
    "greedy_agreement": Field(
        "greedy agreement", "share of the target's greedy tokens that the draft predicts greedily"
    ),
    **{
        f"{name}_t{t}": Field(f"{name}, T = {t}", f"measured {name} at temperature {t}")
        for t in (0, 1)
        for name in ("alpha", "tau")
    },
    **{
        f"{name}_over_{other}": Field(f"{header} / {other}", f"ratio to {whose}")
        for name, header in (("expected_alpha", "expected alpha"), ("alpha_t0", "alpha, T = 0"))
        for other, whose in (
            ("before", "that of the draft before distillation"),
            ("control", "that of the control, the likelihood of the data"),
        )
    },
    # losslessness
    "part": Field("part", "exact: enumerated; drawn: tested on samples; power: planted faults"),
    "options": Field("options", "the sampling options of the case"),
    "lossless": Field("lossless", "whether the rule is lossless"),
    "error": Field("largest error", "largest error of a probability of the output distribution"),
    "kl": Field("KL (nats)", "KL(target || output), the divergence of the output distribution"),
    "passed": Field("passed", "whether the check passed"),
    "what": Field("tested", "the tokens whose distribution is tested"),
    "num_draws": Field("draws", "number of draws"),
    "num_cells": Field("cells", "number of cells of the G-test"),
    "statistic": Field("G statistic", "statistic of the G-test"),
    "p_value": Field("p-value", "p-value of the G-test with all draws"),
    "p_value_of_1000": Field("p-value of 1,000 draws", "p-value of the G-test with the first 1,000 draws"),
    "bug": Field("fault", "the planted fault"),
    "caught_by": Field("caught by", "the check that detects the fault"),
    "evidence": Field("evidence", "the value by which the check decides"),
    "outcome": Field("outcome", "the result of the check"),
}
# Fields that mean something else in one experiment.
_MEANINGS_OF_EXPERIMENT = {
    "throughput": {
        "speedup": "tokens per second of refilled over fixed rows: median of the turns",
        "num_draft": "the drafter of --num_draft; 0 is autoregressive decoding",
    }
}


def header(name: str) -> str:
    """Returns the header of a field; one without an entry is its own header, in words."""
    return _FIELDS[name].header if name in _FIELDS else name.replace("_", " ")


def below(experiment: str, names: Iterable[str]) -> str:
    """Returns the legend of a table as a Markdown list; empty if no field has an entry."""
    own = _MEANINGS_OF_EXPERIMENT.get(experiment, {})
    known = [name for name in names if name in _FIELDS]
    lines = [f"- {header(name)} (`{name}`): {own.get(name, _FIELDS[name].meaning)}\n" for name in known]
    return "".join(["\nColumns:\n\n", *lines]) if lines else ""
