"""The table of every metric, span and event: data only, long because it has one entry a key. Looked up and printed by registry.py."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """One key, or a family of keys with a '<name>' part."""

    key: str
    definition: str
    unit: str
    healthy: str
    action: str
    """What to do when the value is not healthy."""


class Line(NamedTuple):
    """One kind of span or event."""

    name: str
    role: str
    definition: str


TRAINER = (
    Metric(
        "trainer/loss/mean",
        "Sum of the loss over the batch divided by its loss tokens.",
        "1",
        "small and noisy around 0; its level says nothing",
        "Look at reward and mismatch instead. NaN: see `trainer/step/skipped`.",
    ),
    Metric(
        "trainer/grad/norm",
        "Global gradient norm before clipping.",
        "1",
        "steady, below `trainer.optim.clip_norm` most of the time",
        "A sudden rise: lower the learning rate or check the reward for outliers. A sudden drop often precedes a collapse: check entropy.",
    ),
    Metric(
        "trainer/optim/lr",
        "Learning rate of this step.",
        "1",
        "as scheduled",
        "Compare with `trainer.optim` in config.toml.",
    ),
    Metric(
        "trainer/time/step_s",
        "Forward, backward and optimizer of one step, waiting excluded.",
        "s",
        "steady for steady batch sizes",
        "Long: fewer tokens a batch, bfloat16 where the hardware has it, `recompute = 'none'`.",
    ),
    Metric(
        "trainer/time/wait_batch_s",
        "Time the trainer waited for this batch.",
        "s",
        "near 0 when the trainer is the bottleneck",
        "Large: generation is the bottleneck. More replicas, more concurrency, shorter completions, or a higher `max_off_policy_steps`.",
    ),
    Metric(
        "trainer/time/publish_s",
        "Writing, hashing and announcing the new weights.",
        "s",
        "well below the step time",
        "Large: a slow disk under the run folder.",
    ),
    Metric(
        "trainer/time/checkpoint_s",
        "How long training stood still for the checkpoint of this step: copying it, and what was left of writing it before the next one.",
        "s",
        "near 0",
        "Large: a slow disk, or raise `checkpoint.interval`.",
    ),
    Metric(
        "trainer/tokens/trained",
        "Tokens of this step's batch, prompts included.",
        "tokens",
        "steady",
        "Falling: completions get shorter, or groups are dropped; see `orchestrator/dropped/<reason>`.",
    ),
    Metric(
        "trainer/tokens/loss",
        "Tokens of this step's batch that carry loss: the divisor of the loss.",
        "tokens",
        "a steady share of `trainer/tokens/trained`",
        "A small share: long prompts or tool outputs. That is waste, not an error.",
    ),
    Metric(
        "trainer/samples/trained",
        "Samples in this step's batch.",
        "samples",
        "`orchestrator.batch` as configured",
        "Fewer: the run is draining at its end, or batches are cut by tokens.",
    ),
    Metric(
        "trainer/mismatch_kl/mean",
        "k3 estimate of KL(engine, trainer) over loss tokens: mean of ratio - 1 - log ratio.",
        "nats",
        "dense 1e-5 to 1e-3; MoE without replay 1e-3 to 1e-1; grows with lag",
        "Compare fresh with stale. Fresh high: numerics or routing differ between engine and trainer. Only stale high: too much lag.",
    ),
    Metric(
        "trainer/mismatch_kl/fresh",
        "The same over tokens of lag 0: engine and trainer hold equal weights, so any value above rounding is a numerical difference.",
        "nats",
        "float32 on both sides with replay: below 1e-6; bfloat16 engine: below 1e-3",
        "A bug detector: check dtype, `router_replay`, sampling truncation (top_p, top_k, min_p), temperature.",
    ),
    Metric(
        "trainer/mismatch_kl/stale",
        "The same over tokens with lag above 0.",
        "nats",
        "below about 1e-2, and not growing",
        "Growing: lower `max_off_policy_steps` or the learning rate.",
    ),
    Metric(
        "trainer/ratio/extreme_frac",
        "Share of loss tokens with a ratio outside [0.5, 2].",
        "fraction",
        "below 0.01",
        "Above 0.1 a run is close to collapse: lower lag or learning rate, turn replay on.",
    ),
    Metric(
        "trainer/ratio/masked_frac",
        "Share of loss tokens that the loss itself dropped (trust region, IcePop, clip).",
        "fraction",
        "below 0.05",
        "High: much of the batch is wasted; lower lag or learning rate.",
    ),
    Metric(
        "trainer/entropy/mean",
        "Mean entropy of the policy's next-token distribution at loss tokens.",
        "nats",
        "falls slowly, stays above 0",
        "Near 0: the policy has collapsed onto one answer; lower the learning rate, use CISPO or a higher clip, check the reward.",
    ),
    Metric(
        "trainer/lag/mean",
        "Mean over loss tokens of (version the batch trains from - version that sampled the token).",
        "versions",
        "between 0 and `max_off_policy_steps`; about 1 when engine and trainer are balanced",
        "High: the engine is slow or batches wait in the queue; lower concurrency.",
    ),
    Metric(
        "trainer/lag/max",
        "Largest lag in the batch.",
        "versions",
        "never above `max_off_policy_steps`",
        "Above the bound: a bug in slipstream; report it with the run folder.",
    ),
    Metric(
        "trainer/replay/coverage_frac",
        "Share of tokens whose experts were replayed from the engine.",
        "fraction",
        "near 1 (the last sampled token of a sample has no row)",
        "Low: routing rows get lost; check `engine.capture_routing` and aborted requests.",
    ),
    Metric(
        "trainer/replay/flip_frac",
        "Share of replayed (token, layer) pairs whose native top-k set differs from the replayed one.",
        "fraction",
        "below 0.1 at lag 0; grows with lag",
        "High at lag 0: engine and trainer disagree numerically in the router.",
    ),
    Metric(
        "trainer/balance/imbalance",
        "Load of the busiest expert over the mean load, averaged over MoE layers.",
        "ratio",
        "1 to 3",
        "Rising: experts starve; set `trainer.balance_rate` or freeze the router.",
    ),
    Metric(
        "trainer/balance/aux_loss",
        "The auxiliary loss before its weight, mean over tokens and MoE layers; only with `trainer.aux_loss`.",
        "ratio",
        "1 (even within each document) to the number of experts over top-k",
        "Not falling: raise `trainer.aux_loss`. Reward falls with it: lower it.",
    ),
    Metric(
        "trainer/memory/rss_mib",
        "Resident memory of the trainer process.",
        "MiB",
        "flat after the first steps",
        "Growing: a leak; report it. Too high: fewer `row_tokens`, `recompute = 'layer'`.",
    ),
    Metric(
        "trainer/step/skipped",
        "1 when the step was skipped for a non-finite loss or gradient, else 0.",
        "0 or 1",
        "0",
        "The batch is kept in the run folder. Repeated: stop, replay that batch, check rewards and learning rate.",
    ),
    Metric(
        "trainer/fp8/weight_error",
        'With `trainer.dtype = "float8"`: norm of the rounding error of all FP8 weights over their norm.',
        "ratio",
        "0.02 to 0.03",
        "Higher: weights with outliers within a block of 128 x 128. Train in bfloat16 and compare.",
    ),
    Metric(
        "trainer/fp8/input_error",
        "The same for the inputs of the FP8 products, over the step's forward passes.",
        "ratio",
        "0.02 to 0.03",
        "Higher: features far larger than their neighbours. Train in bfloat16 and compare.",
    ),
    Metric(
        "trainer/fp8/grad_error",
        "The same for the gradients that enter the FP8 products of the backward pass.",
        "ratio",
        "0.02 to 0.04",
        "Higher, or rising: see `trainer/fp8/grad_underflow_frac`.",
    ),
    Metric(
        "trainer/fp8/grad_underflow_frac",
        "Share of these gradients that are not 0 and become 0.",
        "fraction",
        "below 0.1",
        "Higher: gradients of very different size within 128 features. Train in bfloat16 and compare the loss.",
    ),
)

ORCHESTRATOR = (
    Metric(
        "orchestrator/reward/mean",
        "Mean reward of every rollout with a reward that ended since the last step, before filters and advantages.",
        "reward",
        "rises",
        "Flat from the start: tasks too hard or too easy (see `orchestrator/filter/<name>`). Falling: lower the learning rate or lag.",
    ),
    Metric(
        "orchestrator/reward/<env>/mean",
        "The same for one environment.",
        "reward",
        "rises",
        "As above; compare environments to see which one holds the mean down.",
    ),
    Metric(
        "orchestrator/success/<env>/frac",
        "Share of the environment's rollouts that ended since the last step with a reward of at least `eval.success_reward`.",
        "fraction",
        "rises; most informative between 0.2 and 0.8",
        "Stuck at 0 or 1: nothing to learn from; change the task mix or let the curriculum retire tasks.",
    ),
    Metric(
        "orchestrator/lag/mean",
        "Mean lag over the loss tokens of the batch, at ship.",
        "versions",
        "between 0 and `max_off_policy_steps`",
        "See `trainer/lag/mean`.",
    ),
    Metric(
        "orchestrator/lag/max",
        "Largest lag in the batch, at ship.",
        "versions",
        "never above `max_off_policy_steps`",
        "Above the bound: a bug in slipstream; report it with the run folder.",
    ),
    Metric(
        "orchestrator/rollouts/<outcome>",
        "Rollouts that ended with this outcome since the start of the run.",
        "rollouts",
        "completed and truncated dominate; errors below 0.01 of all",
        "Errors: read them with `slipstream rollouts RUN --outcome NAME`. Many truncated: raise max_tokens or max_turns.",
    ),
    Metric(
        "orchestrator/dropped/<reason>",
        "Issued rollouts that were not trained, by reason, since the start of the run.",
        "rollouts",
        "a small share of what is issued",
        "stale: lower concurrency. cut: longer deadline. zero_advantage: change difficulty. restart: none needed.",
    ),
    Metric(
        "orchestrator/in_flight/count",
        "Rollouts being played now.",
        "rollouts",
        "near `orchestrator/concurrency/limit`",
        "Well below it: dispatch is held back by the lag bound; raise `max_off_policy_steps` if the engine idles.",
    ),
    Metric(
        "orchestrator/ready/samples",
        "Samples that wait for a batch after this one was cut.",
        "samples",
        "below one batch",
        "Several batches: the trainer is the bottleneck, and lag grows with the queue.",
    ),
    Metric(
        "orchestrator/concurrency/limit",
        "Rollouts that may run at once.",
        "rollouts",
        "steady below `concurrency.max`",
        "Falling to `concurrency.min`: the KV cache is too small; raise `engine.kv_memory_mib`.",
    ),
    Metric(
        "orchestrator/time/wait_ready_s",
        "Time this batch waited for enough ready samples.",
        "s",
        "positive when the trainer is faster than the engine",
        "Large together with an idle trainer: generation is the bottleneck.",
    ),
    Metric(
        "orchestrator/time/wait_version_s",
        "Time dispatch or shipping was held back for a newer policy version (the lag bound).",
        "s",
        "near 0, except with `max_off_policy_steps = 0`",
        "Large together with an idle engine: training is the bottleneck, or raise `max_off_policy_steps`.",
    ),
    Metric(
        "orchestrator/time/wait_slots_s",
        "Time dispatch was held back because the concurrency limit was reached.",
        "s",
        "any; the usual state of a run whose engine is the bottleneck",
        "Large together with an idle engine: raise `concurrency.max`.",
    ),
    Metric(
        "orchestrator/time/wait_rate_s",
        "Time dispatch was held back by `concurrency.tasks_per_minute`.",
        "s",
        "0 without a rate limit",
        "Large together with an idle engine: raise the rate.",
    ),
    Metric(
        "orchestrator/time/wait_infra_s",
        "Time dispatch was held back because rollouts failed for reasons of infrastructure.",
        "s",
        "0",
        "Read the errors with `slipstream rollouts RUN --outcome infra_error`; look at logs/engine-*.log.",
    ),
    Metric(
        "orchestrator/time/wait_update_s",
        "Time the publisher waited for a new policy version.",
        "s",
        "about the trainer's step time",
        "See `trainer/time/step_s` and `trainer/time/wait_batch_s` for what the trainer did meanwhile.",
    ),
    Metric(
        "orchestrator/turns/mean",
        "Mean engine calls in a rollout of this batch.",
        "turns",
        "as the task needs",
        "At `max_turns`: the policy does not finish; look at transcripts.",
    ),
    Metric(
        "orchestrator/tokens/completion_mean",
        "Mean tokens sampled in a rollout of this batch.",
        "tokens",
        "steady, or growing with the reward",
        "Growing without reward: set `advantage.length_penalty`. Falling to 0: the policy gives up.",
    ),
    Metric(
        "orchestrator/loop/lag_s",
        "Largest delay of the event loop since the last step.",
        "s",
        "below 0.1",
        "Large: something blocks the loop; an `async` environment hook that computes must become a plain one.",
    ),
    Metric(
        "orchestrator/loop/missed_wakes",
        "Times that a loop found work by looking again although nobody had woken it.",
        "times",
        "0",
        "Above 0: a bug in slipstream (a wake-up is missing); the run goes on, please report it.",
    ),
    Metric(
        "orchestrator/abandoned/count",
        "Rollouts whose environment ignored cancellation and still runs somewhere; their slot is free.",
        "rollouts",
        "0",
        "An environment swallows cancellation or blocks: mend its hooks; see docs/environments.md.",
    ),
    Metric(
        "orchestrator/curriculum/retired",
        "Training tasks that are retired now (solved or hopeless).",
        "tasks",
        "grows slowly",
        "Most of them: the data set is exhausted; add harder tasks.",
    ),
    Metric(
        "orchestrator/filter/<name>",
        "Rollouts that this filter caught since the start of the run (enforced or only counted).",
        "rollouts",
        "zero_advantage below half of all; the others near 0",
        "zero_advantage high: groups are all solved or all failed. repetition or gibberish: the policy degenerates.",
    ),
    Metric(
        "orchestrator/eval/<env>/avg_at_k",
        "Share of successful rollouts over the held-out tasks, mean over k samples a task, at one policy version.",
        "fraction",
        "rises with the training reward",
        "Training reward rises and this does not: over-fitting, or the reward is being gamed; read transcripts.",
    ),
    Metric(
        "orchestrator/eval/<env>/pass_at_k",
        "Share of held-out tasks with at least one success among k samples.",
        "fraction",
        "at least avg@k; stays up while avg@k rises",
        "Falls while avg@k rises: the policy loses diversity; consider MaxRL or a lower learning rate.",
    ),
    Metric(
        "orchestrator/eval/<env>/reward_mean",
        "Mean reward over the held-out rollouts.",
        "reward",
        "rises",
        "As avg@k.",
    ),
    Metric(
        "orchestrator/memory/rss_mib",
        "Resident memory of the orchestrator process.",
        "MiB",
        "flat",
        "Growing: rollouts pile up; check `orchestrator/ready/samples`.",
    ),
)

ENGINE = (
    Metric(
        "engine/tokens/generated",
        "Tokens sampled since the start of the process.",
        "tokens",
        "grows steadily",
        "Flat: the engine is idle or hung; see `engine/requests/running`.",
    ),
    Metric(
        "engine/tokens/prefilled",
        "Prompt tokens computed since the start of the process.",
        "tokens",
        "grows; a small multiple of the new prompt tokens",
        "Fast growth with several turns: the prefix cache misses; see `engine/tokens/cached`.",
    ),
    Metric(
        "engine/tokens/cached",
        "Prompt tokens taken from the prefix cache since the start of the process.",
        "tokens",
        "most of the prompt tokens, in groups and later turns",
        "Low: the cache is too small (`engine.kv_memory_mib`) or prompts do not share prefixes.",
    ),
    Metric(
        "engine/time/busy_s",
        "Seconds spent computing since the start of the process.",
        "s",
        "near uptime when generation is the bottleneck",
        "Low: see who waits for whom in the report's timeline.",
    ),
    Metric(
        "engine/time/uptime_s",
        "Seconds since the start of the process.",
        "s",
        "grows",
        "Restarts from 0: the process was restarted; see logs/engine-*.log.",
    ),
    Metric(
        "engine/requests/running",
        "Sequences being decoded or prefilled now.",
        "requests",
        "near `engine.max_running` under load",
        "Low with many waiting: the KV cache is full.",
    ),
    Metric(
        "engine/requests/waiting",
        "Requests in the queue now.",
        "requests",
        "small",
        "Growing: concurrency is above what the engine can serve; it adds lag, not throughput.",
    ),
    Metric(
        "engine/kv/used_frac",
        "Share of KV blocks that running sequences hold.",
        "fraction",
        "below `concurrency.kv_high_frac`",
        "Near 1: preemptions; raise `engine.kv_memory_mib` or lower concurrency.",
    ),
    Metric(
        "engine/kv/age_max",
        "Largest age, in policy versions, of a KV block read by a running sequence.",
        "versions",
        "at most `max_off_policy_steps`",
        "Above it: set `engine.on_update = 'recompute'`.",
    ),
    Metric(
        "engine/version/live",
        "Policy version that samples now.",
        "version",
        "follows the trainer within a second or so",
        "Stands still: prepare or commit fails; see logs/engine-*.log.",
    ),
    Metric(
        "engine/canary/gap_nats",
        'Mean difference of the canary prompts\' logprobs from those of a fresh load, at the last weight update (engine.type = "vllm").',
        "nats",
        "well below engine.canary_tolerance",
        "Near the tolerance: rounding of this model is large, raise it; above: the update was refused, see the log.",
    ),
    Metric(
        "engine/canary/refused",
        'Weight updates that were undone because vLLM did not load them or did not compute what they say (engine.type = "vllm").',
        "updates",
        "0",
        "Above 0: this version of vLLM loads weights wrongly; see docs/vllm.md and the traceback in logs/engine-*.log.",
    ),
    Metric(
        "engine/preemptions/count",
        "Sequences pushed out of the KV cache and recomputed, since the start of the process.",
        "sequences",
        "0 or few",
        "Growing: the KV cache is too small for the concurrency.",
    ),
    Metric(
        "engine/steps/failed",
        "Steps that raised, since the start of the process; the requests that were running were refused and sent again.",
        "steps",
        "0",
        "Above 0: the traceback is in the engine's log. Five in a row end the process, and the supervisor starts another.",
    ),
    Metric(
        "engine/speculation/drafted",
        "Guessed tokens that were processed on trial since the start of the process (`engine.speculation`).",
        "tokens",
        "0 without speculation",
        "0 with it: the text does not repeat itself, or the steps are full.",
    ),
    Metric(
        "engine/speculation/accepted",
        "Guessed tokens that were right: each saved its sequence a step.",
        "tokens",
        "grows with transcripts that repeat themselves",
        "See `engine/speculation/acceptance_frac`.",
    ),
    Metric(
        "engine/speculation/acceptance_frac",
        "Share of guessed tokens that were right, since the start of the process.",
        "fraction",
        "above a half; lower is fine with few sequences at a time",
        "Low: raise `engine.speculation.min_match_tokens` or lower `engine.speculation.overhead_tokens`.",
    ),
    Metric(
        "engine/speculation/tokens_per_step",
        "Tokens that a decoding sequence gains in a step, mean since the start of the process.",
        "tokens",
        "1 without speculation, more with it",
        "Near 1 with it: nothing is gained; `engine.speculation.type = 'off'` saves the look-ups.",
    ),
    Metric(
        "engine/time/prepare_s",
        "Time to load and verify the last policy version, while decoding went on.",
        "s",
        "below the step time",
        "Large: a slow disk under the run folder.",
    ),
    Metric(
        "engine/time/commit_s",
        "Time for which decoding stood still to swap the last policy version in.",
        "s",
        "milliseconds",
        "Large: memory pressure, or `on_update = 'recompute'` with long contexts.",
    ),
    Metric(
        "engine/memory/rss_mib",
        "Resident memory of the engine process.",
        "MiB",
        "flat after the first requests",
        "Growing: a leak; report it.",
    ),
    Metric(
        "engine/ep/vote_s",
        "With `engine.ep`: seconds spent waiting, between steps, for the other processes that share the experts; since the start.",
        "s",
        "small beside `engine/time/busy_s`",
        "Large in all but one process: that one is slower, or has more requests; see `engine/requests/running` of each.",
    ),
    Metric(
        "engine/ep/idle_steps",
        "With `engine.ep`: steps in which this process only served experts, having no token of its own; since the start.",
        "steps",
        "few while there is work for all",
        "Most steps: requests do not reach this process; see how the pool spreads them.",
    ),
    Metric(
        "engine/ep/served_pairs",
        "With `engine.ep`: pairs of a token and an expert that this process has computed, whoever asked; since the start.",
        "pairs",
        "about the same in all processes of a group",
        "Uneven: see `engine/ep/imbalance`.",
    ),
    Metric(
        "engine/ep/imbalance",
        "With `engine.ep`: pairs computed by the busiest process over the mean, averaged over layers, between the last two looks at the "
        "load (every `engine.ep.rebalance_steps`).",
        "1",
        "near 1",
        "High for long: raise `engine.ep.redundant_experts`, or lower `engine.ep.rebalance_gain`.",
    ),
    Metric(
        "engine/ep/imbalance_before",
        "With `engine.ep`: `engine/ep/imbalance` when experts were moved the last time.",
        "1",
        "above `engine/ep/imbalance`",
        "Below it: the load has changed since, or had too few tokens to judge by; raise `engine.ep.rebalance_steps`.",
    ),
    Metric(
        "engine/ep/rebalances",
        "With `engine.ep`: times that experts were placed anew, since the start.",
        "times",
        "a few after the start, then rarely",
        "Growing steadily: the load swings; raise `engine.ep.rebalance_gain` or `engine.ep.rebalance_steps`.",
    ),
    Metric(
        "engine/ep/moved_experts",
        "With `engine.ep`: experts of a layer that came here from other processes, since the start.",
        "experts",
        "as `engine/ep/rebalances`",
        "See `engine/ep/rebalances`.",
    ),
    Metric(
        "engine/ep/dispatch_s/<layer>",
        "With `engine.ep`: seconds until the tokens of all processes have come to the experts of this MoE layer, waiting for the slowest "
        "included; since the start.",
        "s",
        "near `engine/ep/combine_s/<layer>`",
        "Much longer: processes reach the layer at different times, because they have different numbers of tokens.",
    ),
    Metric(
        "engine/ep/compute_s/<layer>",
        "With `engine.ep`: seconds in the experts of this MoE layer that are here; since the start.",
        "s",
        "most of the layer",
        "Small beside dispatch and combine: too few tokens a step for so many processes.",
    ),
    Metric(
        "engine/ep/combine_s/<layer>",
        "With `engine.ep`: seconds until the results of this MoE layer have come back and are added up, waiting for the slowest included; "
        "since the start.",
        "s",
        "near `engine/ep/dispatch_s/<layer>`",
        "Much longer: the experts of one process are hotter; see `engine/ep/imbalance`.",
    ),
)

GATEWAY = (
    Metric(
        "gateway/sessions/open",
        "Sessions of agents that are open now.",
        "sessions",
        "the rollouts of agents in flight",
        "Growing without end: a client opens sessions and does not end them; see `gateway.idle_s`.",
    ),
    Metric(
        "gateway/sessions/opened", "Sessions opened since the start.", "sessions", "grows with the rollouts", "Flat: no agent is played."
    ),
    Metric(
        "gateway/turns/count",
        "Calls of sessions that were answered and recorded since the start.",
        "turns",
        "several a session",
        "Flat with open sessions: agents hang; see `engine/requests/running` and the agents' own logs.",
    ),
    Metric(
        "gateway/tokens/recorded",
        "Tokens sampled in recorded turns since the start.",
        "tokens",
        "with `gateway/tokens/lost`, what the engines sampled for sessions",
        "Less than that: calls were given up before their answer.",
    ),
    Metric(
        "gateway/tokens/lost",
        "Tokens that were streamed to calls which were given up in the middle: in no turn.",
        "tokens",
        "0",
        "Agents cut their streams: raise their timeouts, or accept the waste.",
    ),
    Metric(
        "gateway/forks/<kind>",
        "Calls that start a branch of their own since the start. branched: beside another call, or in another conversation; rewritten: the "
        "history holds a reply that was not sampled here, as when an agent edits or summarises it.",
        "calls",
        "0 rewritten for an agent that only appends; branched where it works with sub-agents",
        "Each fork is a sample that repeats its prompt. Many rewritten: look in `slipstream rollouts` for what the agent changes.",
    ),
    Metric(
        "gateway/sampling/overridden",
        "Calls that asked for another temperature, top_p, top_k, min_p or seed than their session's contract, which held.",
        "calls",
        "0, or every call of an agent that sets a temperature of its own",
        "Take the setting out of the agent, to be sure that it does not count on it.",
    ),
    Metric("gateway/streams/open", "Streamed answers that are on their way now.", "streams", "at most the calls in flight", "None."),
    Metric(
        "gateway/errors/<kind>",
        "Requests that failed since the start, by kind: bad_request, invalid_api_key, model_not_found, no_session, session_exists, "
        "session_ended, session_budget_spent, context_length_exceeded, too_large, busy, unavailable, disconnected, internal, ...",
        "requests",
        "0, but for session_budget_spent and, when rollouts are cancelled, disconnected",
        "busy, unavailable: the engines; session_ended: an agent outlives its rollout; internal: a bug, with its traceback in the log.",
    ),
)


ROUTER = (
    Metric(
        "router/replicas/ready",
        "Replicas that may get a request now.",
        "1",
        "all of them",
        "Fewer: see `router/breaker/<replica>` and `router/replicas/draining`, then the log of the replica that is missing.",
    ),
    Metric(
        "router/replicas/draining",
        "Replicas that get no new requests because somebody wants so, or because they are no longer members.",
        "1",
        "0 outside maintenance",
        "Take it back with `slipstream drain RUN REPLICA --undo`.",
    ),
    Metric(
        "router/requests/in_flight",
        "Requests that are at a replica now.",
        "1",
        "near the concurrency limit",
        "Low while rollouts wait: environments or tools are what is slow.",
    ),
    Metric(
        "router/requests/waiting",
        "Requests that wait for a replica that may take them.",
        "1",
        "0",
        "No replica is ready: see `router/replicas/ready`. At `router.max_waiting` further ones are refused.",
    ),
    Metric(
        "router/tokens/pending",
        "Prompt tokens that were sent and are presumably not computed yet, over all replicas.",
        "tokens",
        "well below what the replicas prefill in a second",
        "High for long: prefill is the bottleneck; add replicas, or look at the share of `router/tokens/cached` in `router/tokens/prompt`.",
    ),
    Metric(
        "router/tokens/prompt",
        "Prompt tokens of answered requests since the start.",
        "tokens",
        "grows",
        "Flat: nothing is answered.",
    ),
    Metric(
        "router/tokens/predicted",
        "Of these, tokens that the router expected in the chosen replica's KV cache.",
        "tokens",
        "within some percent of `router/tokens/cached`",
        "Much above it: replicas reclaim more than they say; lower `router.index_tokens`. Much below: somebody else uses them too.",
    ),
    Metric(
        "router/tokens/cached",
        "Of these, tokens whose KV was in the cache, as the engine says.",
        "tokens",
        "most of `router/tokens/prompt` with several turns",
        "Low: the cache is too small for the sessions at once (`engine.kv_memory_mib`), or they move: `router/moves/<reason>`.",
    ),
    Metric(
        "router/time/decision_us",
        "Mean time to hash a prompt and choose a replica, since the start.",
        "us",
        "below 1000",
        "High: prompts are very long, or there are very many replicas.",
    ),
    Metric(
        "router/breaker/<replica>",
        "Circuit breaker of the replica: 0 closed, 1 half open (one request is tried), 2 open (it gets none).",
        "1",
        "0",
        "2: the replica fails again and again, or is slow; see its log.",
    ),
    Metric(
        "router/served/<replica>",
        "Requests sent to the replica since the start.",
        "1",
        "even over replicas of the same kind",
        "One far below: it was away or slow. With long shared prompts some skew is what the policy wants.",
    ),
    Metric(
        "router/decisions/<reason>",
        "Decisions since the start by reason: home (the session's replica), prefix (the most of its prompt is there), load (another has "
        "less to do), cold (nobody has any of it), hash, turn.",
        "1",
        "mostly home or prefix with several turns",
        "Much load with kv_aware: replicas are overloaded unevenly; see `router/moves/<reason>`.",
    ),
    Metric(
        "router/moves/<reason>",
        "Sessions that went on at another replica, by reason: load, prefix, down, draining, breaker, busy, left.",
        "1",
        "few",
        "Many by load: raise `router.weights.stay`. Many by down: see `engine/steps/failed` and the supervisor's lines.",
    ),
    Metric(
        "router/rejections/<reason>",
        "Requests that ended without an answer, by reason: full (`router.max_waiting`), busy (the queue of every replica is full), "
        "unavailable (none was ready within `router.patience_s`), given_up (it failed four times), refused (it can never succeed), "
        "cancelled (by its caller).",
        "1",
        "none but cancelled, which stale and cut rollouts cause",
        "The error of the rollout names the replica and the reason.",
    ),
    Metric(
        "router/retries/count",
        "Requests sent again after their replica failed, since the start.",
        "1",
        "0 while no engine dies",
        "Steady growth: an engine fails again and again; see `engine/steps/failed`.",
    ),
    Metric(
        "router/down/count",
        "Times that a replica that was up failed a call or a health check, since the start.",
        "1",
        "0",
        "The log of the orchestrator names the replica and the reason.",
    ),
    Metric(
        "router/slow/count",
        "Times that a replica was kept out for being `router.slow_factor` times slower than the median, since the start.",
        "1",
        "0",
        "Look at what else runs on its host.",
    ),
)

METRICS = (*TRAINER, *ORCHESTRATOR, *ROUTER, *ENGINE, *GATEWAY)

SPANS = (
    Line("step", "trainer", "Forward, backward and optimizer of one step."),
    Line("publish", "trainer", "Writing and announcing new weights."),
    Line("checkpoint", "trainer", "Writing a checkpoint, while training goes on."),
    Line("wait_batch", "trainer", "Waiting for the next batch."),
    Line("busy", "engine", "The engine computes; merged to one span a busy period, or a second."),
)

EVENTS = (
    Line("expert_load", "trainer, engine", "`load`: share of tokens for each MoE layer and expert; each layer sums to 1."),
    Line("step_skipped", "trainer", "A step was skipped for a non-finite loss or gradient: `step`, `reason`, `batch` (where it is kept)."),
    Line("heartbeat", "trainer", "The trainer is alive and waits for the batch after `step`."),
    Line("checkpoint_failed", "trainer", "No room for a checkpoint; training goes on with the previous one: `step`, `error`."),
    Line("resumed", "trainer", "Training goes on from the checkpoint of `step`."),
    Line("eval", "orchestrator", "One evaluation: `version`, `env`, `avg_at_k`, `pass_at_k`, `reward_mean`, `samples`."),
    Line("eval_abandoned", "orchestrator", "An evaluation did not end within its deadline: `version`, `seconds`."),
    Line(
        "frozen",
        "orchestrator",
        "Rollout `rollout` of `task` in `env` was being played when an earlier process stood still; it is not played again.",
    ),
    Line("eval_failed", "orchestrator", "An environment failed in every rollout of an evaluation: `version`, `env`, `error`."),
    Line("published", "orchestrator", "A policy version went live on every engine: `version`, `seconds`."),
    Line("publish_failed", "orchestrator", "A policy version did not go live, and will be tried again: `version`, `error`."),
    Line("lag_histogram", "orchestrator", "`counts`: loss tokens of the batch of `step`, by lag."),
    Line("missed_wake", "orchestrator", "`what` was waited for and nobody woke the loop; see `orchestrator/loop/missed_wakes`."),
)
