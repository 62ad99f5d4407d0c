"""The main job: warm up, train by reinforcement learning, compare, report. Resumable at every moment."""

import contextlib
import fcntl
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from searchrl_jax.config.overlays import to_json
from searchrl_jax.config.schema import RESUMABLE_CHANGES, Experiment, mixing_weights
from searchrl_jax.core.fair_lock import FairLock
from searchrl_jax.core.random import named_key
from searchrl_jax.data.collection import spread
from searchrl_jax.data.schema import Task
from searchrl_jax.data.stream import TaskStream
from searchrl_jax.env.demonstrator import DemonstrationError, Demonstrator
from searchrl_jax.evaluation.agents import play_tasks
from searchrl_jax.evaluation.rescore import TOLERANCE, rescored_metrics, titles_of
from searchrl_jax.models.axes import CACHE_AXES, PARAMETER_AXES
from searchrl_jax.models.checksum import checksum
from searchrl_jax.models.decoder import Params, init_params
from searchrl_jax.models.dtype import held_in
from searchrl_jax.models.hf import load_pretrained, save_adapters, save_pretrained
from searchrl_jax.parallel.mesh import device_memory, make_mesh
from searchrl_jax.parallel.rules import place_rows, tree_shardings
from searchrl_jax.retrieval import Retriever
from searchrl_jax.rollout.asynchronous import AsynchronousSource
from searchrl_jax.rollout.collect import Player
from searchrl_jax.rollout.engine import Engine, Sampling
from searchrl_jax.rollout.source import GroupSource, Plan, SynchronousSource
from searchrl_jax.rollout.trajectory import Trajectory
from searchrl_jax.train.checkpoint import Checkpointer, CheckpointMismatch
from searchrl_jax.train.claims import Difference, claim
from searchrl_jax.train.finish import compare_and_report
from searchrl_jax.train.interrupt import Interrupted, StopSignal
from searchrl_jax.train.learn import batch_of
from searchrl_jax.train.learner import Learner
from searchrl_jax.train.measures import distributions, prefixed, rollout_metrics, success_metrics
from searchrl_jax.train.progress import ALARM_STEPS, Progress, or_dash, search_alarm, train_line
from searchrl_jax.train.shapes import engine_shapes, training_rows
from searchrl_jax.train.state import init_state
from searchrl_jax.train.step import LossSpec, make_update
from searchrl_jax.train.tracker import DamagedLog, MetricsLog, WandbMirror, read_rows
from searchrl_jax.train.warmup import DemonstrationStream, make_warmup_optimizer, shares_of, warn_of_limits
from searchrl_jax.train.workspace import Workspace, build_workspace

WARMUP_SAVE_EVERY = 200
WARMUP_LOG_EVERY = 50


def run(
    experiment: Experiment,
    wrap_tool: Callable[[Retriever], Retriever] = lambda retriever: retriever,
) -> dict[str, Any]:
    """Runs `experiment` from where its run directory stands to the end, and returns the summary of `final.json`.

    Args:
        wrap_tool: what the policy's tools become, such as slower ones, for a rehearsal; the baselines keep theirs.

    Raises:
        SetupError: the configuration or the data is at fault, or the directory holds a run of another configuration.
        Interrupted: stopped by a signal or the time limit; all work is saved.
    """
    workdir = Path(experiment.workdir or f"runs/{experiment.exp}")
    with contextlib.ExitStack() as stack:
        claimed: list[Path] = []
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_only_process(workdir))
            made = ("config.json", "data.json", "tokenizer.json", "base.json")
            claimed = [path for name in made if not (path := workdir / name).exists()]
            stop = stack.enter_context(StopSignal(experiment.time_limit_hours))
            refusal = functools.partial(_other_configuration, workdir)
            claim(workdir / "config.json", to_json(experiment), refusal, ignore=RESUMABLE_CHANGES)
            job = _Run(experiment, workdir, stop, wrap_tool)
            stack.callback(job.close)
        except (ValueError, OSError) as error:
            for path in claimed:  # what is corrected now is not held against what was wrong
                path.unlink(missing_ok=True)
            raise SetupError(str(error)) from error
        try:
            return job.finish()
        except (SetupError, CheckpointMismatch, DemonstrationError, DamagedLog) as error:
            if not any(workdir.glob("checkpoints/*/[0-9]*")):  # nothing is kept that they would guard
                for path in claimed:
                    path.unlink(missing_ok=True)
            raise SetupError(str(error)) from error


class SetupError(ValueError):
    """A run that cannot begin, or not go on: the message says what was expected, what came, and what to do."""


class _Run:
    """One process's work on a run."""

    def __init__(
        self,
        experiment: Experiment,
        workdir: Path,
        stop: StopSignal,
        wrap_tool: Callable[[Retriever], Retriever],
    ) -> None:
        self.experiment, self.workdir, self.stop = experiment, workdir, stop
        self.config_json = to_json(experiment)
        began = time.perf_counter()
        print("setting up: documents, indexes, tokenizer", flush=True)
        self.work: Workspace = build_workspace(experiment, workdir, wrap_tool)
        self.seconds = {"setup": time.perf_counter() - began}
        sizes = ", ".join(f"{len(tasks):,} {split}" for split, tasks in self.work.tasks.items())
        print(f"{len(self.work.documents):,} documents; tasks: {sizes}; {self.seconds['setup']:.0f} s", flush=True)
        self.titles = titles_of(self.work.documents)
        # Made before the warm-up, so that a batch larger than the training set is refused at once.
        data = experiment.data
        self.stream = TaskStream(
            self.work.tasks["train"],
            experiment.batch.global_batch_size,
            experiment.seed,
            weights=mixing_weights(data.mixing),
            field=data.mixing_field,
            curriculum=data.curriculum,
        )
        limits = self.work.env.limits
        mesh = experiment.mesh
        self.mesh = make_mesh(mesh.data, mesh.fsdp, mesh.tensor)
        self.row_shapes = training_rows(experiment, self.mesh)
        rollout = experiment.rollout
        if rollout.max_steps_off_policy and jax.process_count() > 1:
            raise ValueError(
                f"rollout.max_steps_off_policy: expected 0 with {jax.process_count()} processes, got "
                f"{rollout.max_steps_off_policy}; their clocks would schedule rollouts differently: play in turns"
            )
        shapes = engine_shapes(experiment, self.mesh, self.work.dialect.observation_overhead)
        cache = jax.eval_shape(lambda: shapes.empty_cache(self.work.model))
        engine = Engine(
            self.work.model,
            shapes,
            self.work.dialect.stop_ids,
            named_key(experiment.seed, "rollout"),
            tree_shardings(self.mesh, cache, CACHE_AXES),
            dtype=jnp.dtype(experiment.model.dtype),
        )
        cap = experiment.val.sampling_max_tokens or limits.max_tokens_per_turn
        val_env = self.work.env.with_limits(replace(limits, max_tokens_per_turn=cap))
        self.player, self.val_player = (
            Player(
                engine,
                env,
                self.work.dialect,
                timeout_seconds=rollout.rollout_timeout,
                max_retries=rollout.rollout_max_retries,
                max_failed_share=rollout.max_failed_share,
                threads=rollout.rollout_max_concurrency,
            )
            for env in (self.work.env, val_env)
        )
        self.source: GroupSource | None = None
        self.logs = contextlib.ExitStack()
        path = experiment.warmup.path
        if path and not (workdir / "checkpoints" / "warmup").exists():
            self._finished_warmup(Path(path)).close()  # what is wrong with it is said before any work

    def close(self) -> None:
        """Ends the threads, and waits for none that a tool holds up; closes the logs."""
        if self.source is not None:
            self.source.close()
        self.player.close()
        self.val_player.close()
        self.logs.close()

    def finish(self) -> dict[str, Any]:
        """All phases that are not done yet."""
        self._check_stop()
        base = self._warm_up()
        tuned = self._reinforce(base)
        return compare_and_report(
            self.experiment,
            self.workdir,
            self.work,
            self.player,
            {"base": base, "tuned": tuned},
            self.seconds,
            check_stop=self._check_stop,
        )

    def _checkpointer(self, phase: str) -> Checkpointer:
        return Checkpointer(
            self.workdir / "checkpoints" / phase, config=self.config_json, keep=1, may_differ=RESUMABLE_CHANGES
        )

    def _shardings(self, tree: Any) -> Any:
        """Where the arrays of parameters, or of a train state, stay."""
        return tree_shardings(self.mesh, tree, PARAMETER_AXES)

    def _check_stop(self) -> None:
        if self.stop.reason is not None:
            raise _interrupted(self.stop.reason)

    def _beginning(self) -> Params:
        """The parameters that all training begins with."""
        path, dtype = self.experiment.model.path, jnp.dtype(self.experiment.model.dtype)
        if not path:
            return held_in(init_params(self.work.model, named_key(self.experiment.seed, "init")), dtype)
        print(f"reading the weights of {path}", flush=True)
        refusal = (
            f"{path}: its weights are not those that this run began with; put them back, or name another --workdir"
        )
        try:
            _, params = load_pretrained(path, self.mesh)
            odd = [name for name, x in flatten_dict(params, sep="/").items() if not jnp.isfinite(x).all()]
            if odd:
                raise ValueError(f"{path}: expected finite weights, got others in {', '.join(odd)}; fetch it anew")
            claim(self.workdir / "base.json", {"path": path, "checksum": checksum(params)}, lambda _: refusal)
        except ValueError as error:
            raise SetupError(str(error)) from error
        return held_in(params, dtype)

    # ------------------------------------------------------------------ behaviour cloning

    def _warm_up(self) -> Params:
        """The base agent's parameters."""
        experiment, config, work = self.experiment, self.experiment.warmup, self.work
        params = self._beginning()
        if not config.steps and not config.path:
            self.seconds["warmup"] = 0.0
            return jax.device_put(params, self._shardings(params))
        count = sum(x.size for x in jax.tree.leaves(params))
        optimizer = make_warmup_optimizer(config)
        state = init_state(params, optimizer)
        shardings = self._shardings(state)
        state = jax.device_put(state, shardings)
        demonstrator = Demonstrator(work.env, work.dialect, work.documents, shares_of(config), slips=config.slips)
        stream = DemonstrationStream(
            demonstrator,
            work.tasks["train"],
            experiment.seed,
            self.row_shapes,
            copy_steps=config.copy_steps,
            scrambled=config.scrambled,
        )
        checkpoints = self._checkpointer("warmup")
        newest = checkpoints.latest()
        seconds = 0.0
        if newest is not None:
            state, host = checkpoints.restore(state)
            stream.next, seconds = host["next_demonstration"], host["seconds"]
        elif config.path:
            print(f"taking the base agent of {config.path}", flush=True)
            theirs = self._finished_warmup(Path(config.path))
            state = theirs.restore(state).arrays
            theirs.close()
            checkpoints.save(int(state.updates), state, {"next_demonstration": 0, "seconds": 0.0})
        if config.path:
            checkpoints.close()
            self.seconds["warmup"] = 0.0
            return state.params
        done = int(state.updates)
        log = MetricsLog(self.workdir / "warmup.jsonl", resume_step=done if newest is not None else -1)
        self.logs.callback(log.close)
        if done < config.steps:
            gone_on = f"; going on after {done}" if done else ""
            print(f"warm-up: {config.steps} updates of behaviour cloning, {count:,} parameters{gone_on}", flush=True)
            if warning := warn_of_limits(demonstrator, work.tasks["train"], experiment.seed):
                print(f"WARNING: {warning}", flush=True)
        update = make_update(work.model, LossSpec("cross_entropy"), optimizer, shardings)
        progress = Progress(config.steps - done)
        losses: list[float] = []
        began = time.perf_counter() - seconds
        for number in range(done + 1, config.steps + 1):
            state, metrics = update(state, [place_rows(self.mesh, rows) for rows in stream.batch(number)])
            losses.append(metrics["loss"])
            if not math.isfinite(metrics["loss"]):
                raise SetupError(
                    f"warm-up: expected a finite loss, got {metrics['loss']} at update {number}; "
                    f"lower warmup.learning_rate ({config.learning_rate:g})"
                )
            log.append(number, {name: metrics[name] for name in ("loss", "grad_norm", "tokens")})
            # Read once: a signal that came after the decision to save would stop the run with nothing saved.
            is_last, reason = number == config.steps, self.stop.reason
            if number % WARMUP_LOG_EVERY == 0 or is_last:
                left = progress.left(number - done)
                print(f"warm-up {number}/{config.steps}  loss {np.mean(losses):.3f}  left {left}", flush=True)
                losses.clear()
            if number % WARMUP_SAVE_EVERY == 0 or is_last or reason:
                host = {"next_demonstration": stream.next, "seconds": time.perf_counter() - began}
                checkpoints.save(number, state, host)
            if reason and not is_last:
                raise _interrupted(reason)
        checkpoints.close()
        self.seconds["warmup"] = time.perf_counter() - began
        return state.params

    def _finished_warmup(self, run: Path) -> Checkpointer:
        """The checkpoint that the warm-up of another run ended with.

        Raises:
            SetupError: there is none, or its decoder, tokenizer or data are others.
        """
        folder = run / "checkpoints" / "warmup"
        try:
            if not folder.is_dir():
                raise ValueError("there is no checkpoints/warmup; name the directory of a run whose warm-up is over")
            for name in ("data.json", "tokenizer.json"):
                mine, theirs = self.workdir / name, run / name
                if mine.exists() and (not theirs.exists() or mine.read_bytes() != theirs.read_bytes()):
                    raise ValueError(f"its {name} is not that of this run; use the same data and model settings")
            may_differ = tuple(name for name in self.config_json if name != "model")
            checkpoints = Checkpointer(folder, config=self.config_json, may_differ=may_differ)
            warmup, done = json.loads((run / "config.json").read_text())["warmup"], checkpoints.latest() or 0
            if not warmup.get("path") and done < warmup["steps"]:
                raise ValueError(f"its warm-up stands at {done} of {warmup['steps']} updates; let it end")
        except (ValueError, OSError, KeyError) as error:
            raise SetupError(f"warmup.path: expected a run whose base agent fits, got {run}: {error}") from error
        return checkpoints

    # ------------------------------------------------------------------ reinforcement learning

    def _reinforce(self, base: Params) -> Params:
        """The tuned agent's parameters."""
        experiment, work = self.experiment, self.work
        batch, schedule = experiment.batch, experiment.schedule
        total = min(schedule.max_steps, schedule.max_epochs * self.stream.batches_per_epoch)
        device = FairLock()
        learner = Learner(experiment, work.model, base, self.row_shapes, self.mesh, steps=total, device=device)
        self.source = source = self._make_source(total, learner.frozen, device)
        checkpoints = self._checkpointer("rl")
        newest = checkpoints.latest()
        seconds = 0.0
        if newest is not None:
            learner.state, host = checkpoints.restore(learner.state)
            source.restore(newest, host)
            seconds = host["seconds"]
            print(f"resumed after step {newest} of {total}", flush=True)
        log = MetricsLog(
            self.workdir / "metrics.jsonl",
            # Before the first checkpoint only the validation at step 0 counts, and it would come out the same again.
            resume_step=newest if newest is not None else -1,
            mirror=self._mirror(),
        )
        self.logs.callback(log.close)
        done = newest or 0
        save_seconds = 0.0
        began = time.perf_counter() - seconds
        if newest is None and total:
            size = f"{batch.global_batch_size} x {batch.group_size}"
            print(f"reinforcement learning: {total} steps of {size} rollouts", flush=True)
            if total < schedule.max_steps:
                print(
                    f"(schedule.max_steps is {schedule.max_steps}, but {len(work.tasks['train'])} training tasks last "
                    f"no longer; raise schedule.max_epochs, {schedule.max_epochs} now)",
                    flush=True,
                )
        if newest is None and schedule.val_every and experiment.val.val_at_start:
            log.append(0, self._validate(learner.params, 0))
            self._check_stop()
        progress = Progress(total - done)
        for step in range(done + 1, total + 1):
            step_began = time.perf_counter()
            taken = source.take(learner.params, step - 1)
            tasks, groups, trajectories = taken.tasks, taken.groups, taken.trajectories
            rollout_seconds = time.perf_counter() - step_began
            metrics = rollout_metrics(trajectories) | prefixed("rollout", distributions(groups))
            metrics |= {"training/epoch": 1 + (step - 1) // self.stream.batches_per_epoch, "training/global_step": step}
            metrics |= self._rescored(trajectories, tasks, f"step {step}")
            learn_began = time.perf_counter()
            metrics |= learner.learn(groups, step)
            now = time.perf_counter()
            metrics["timing_s/rollout"], metrics["timing_s/policy_update"] = rollout_seconds, now - learn_began
            metrics["timing_s/training"] = now - step_began - rollout_seconds
            metrics["timing_s/save_checkpoint"] = save_seconds
            metrics["tokens_per_second"] = sum(len(t.token_ids) for t in trajectories) / (now - step_began)
            is_last = step == total
            metrics |= {**taken.metrics, **device_memory(self.mesh)}
            sampled = sum(trajectory.num_action_tokens for trajectory in trajectories)
            metrics["throughput/update"] = sampled / metrics["timing_s/policy_update"]
            if schedule.val_every and (step % schedule.val_every == 0 or is_last):
                with source.paused():
                    metrics |= self._validate(learner.params, step)
            metrics["timing_s/step"] = time.perf_counter() - step_began
            _write_trajectories(self.workdir / "trajectories" / f"step_{step:06d}.jsonl", trajectories)
            log.append(step, metrics)
            print(train_line(step, total, metrics, progress.left(step - done)), flush=True)
            if step % ALARM_STEPS == 0 and (alarm := search_alarm(read_rows(self.workdir / "metrics.jsonl"))):
                print(alarm, flush=True)
            reason = self.stop.reason
            if step % schedule.save_every == 0 or is_last or reason:
                save_began = time.perf_counter()
                checkpoints.save(step, learner.state, source.save(step) | {"seconds": save_began - began})
                save_seconds = time.perf_counter() - save_began
            if reason and not is_last:
                raise _interrupted(reason)
        source.close()
        checkpoints.close()
        self.seconds["rl"] = time.perf_counter() - began if total > done else seconds
        if experiment.model.path:
            self._export(learner)
        return learner.params

    def _export(self, learner: Learner) -> None:
        """The tuned model as others load it, in `model/`; adapters by themselves too, in `adapters/`, where no warm-up
        changed what they add to."""
        folders = {"model": lambda path: save_pretrained(path, self.work.model, learner.merged())}
        lora, warmup = self.experiment.lora, self.experiment.warmup
        if lora.lora_rank and not warmup.steps and not warmup.path:
            adapters = learner.state.params
            folders["adapters"] = lambda path: save_adapters(path, self.work.model, adapters, lora.lora_alpha)
        for name, save in folders.items():
            if (path := self.workdir / name).exists():
                continue
            try:
                save(path)
            except (ValueError, OSError) as error:  # the checkpoint that it came from is gone, or there is no room
                raise SetupError(str(error)) from error
            print(f"saved {path}", flush=True)

    def _make_source(self, steps: int, frozen: Params | None, device: FairLock) -> GroupSource:
        """Where the groups of `steps` steps come from, sampled with weights of which `frozen` never change."""
        batch, sampling, rl = self.experiment.batch, self.experiment.sampling, self.experiment.rl
        plan = Plan(
            batch.global_batch_size, batch.group_size, steps, pass_threshold=self.experiment.data.curriculum_threshold
        )
        drawn_from = Sampling(sampling.temperature, sampling.sampling_top_p)
        bound = self.experiment.rollout.max_steps_off_policy
        if bound == 0:
            return SynchronousSource(
                self.player,
                self.stream,
                drawn_from,
                plan,
                refills=rl.refill_groups,
                teaches=lambda groups: batch_of(groups, rl).teaches,
            )
        return AsynchronousSource(
            self.player,
            self.stream,
            {task.task_id: task for task in self.work.tasks["train"]},
            drawn_from,
            plan,
            max_steps_off_policy=bound,
            folder=self.workdir / "checkpoints" / "rollouts",
            device=device,
            frozen=frozen,
        )

    def _validate(self, params: Params, step: int) -> dict[str, float]:
        """`val/` metrics at each validation temperature; those of the first without a suffix."""
        val = self.experiment.val
        tasks = spread(self.work.tasks["validation"], val.val_batch_size)
        began = time.perf_counter()
        metrics: dict[str, float] = {}
        for index, temperature in enumerate(val.temperatures):
            sampling = Sampling(temperature, val.sampling_top_p)
            trajectories = play_tasks(
                self.val_player, params, tasks, sampling, policy_version=step, group_size=val.val_group_size
            )
            groups = [trajectories[i : i + val.val_group_size] for i in range(0, len(trajectories), val.val_group_size)]
            prefix = "val" if index == 0 else f"val_t{temperature:g}"
            found = rollout_metrics(trajectories) | distributions(groups)
            found |= success_metrics(groups, success_threshold=val.success_threshold, pass_k_values=val.pass_k_values)
            found |= self._rescored(trajectories, tasks, f"validation after step {step}, temperature {temperature:g}")
            metrics |= prefixed(prefix, found)
            print(
                f"validation after step {step}, temperature {temperature:g}: nDCG@10 {found['ndcg@10']:.3f}, given "
                f"completion {or_dash(found['ndcg@10_completed'], 3)}, failed {found['failure_rate']:.1%}, "
                f"malformed {found['malformed_rate']:.1%}, turns {found['turns']:.2f}",
                flush=True,
            )
        return metrics | {"timing_s/eval": time.perf_counter() - began}

    def _rescored(self, trajectories: Sequence[Trajectory], tasks: Sequence[Task], where: str) -> dict[str, float]:
        """The metrics of the second reading, with a warning where it disagrees with the environment.

        None in other dialects than hermes, which is all that it can read.
        """
        if self.experiment.model.dialect != "hermes":
            return {}
        found = rescored_metrics(trajectories, tasks, self.titles)
        if found["rescored_ndcg_gap"] > TOLERANCE or found["rescored_inconsistent"]:
            print(
                f"WARNING: {where}: read strictly, the text of {found['rescored_inconsistent']:.1%} of the episodes "
                f"does not lead to what was recorded (largest gap in nDCG@10: {found['rescored_ndcg_gap']:.3f}); "
                "the reward may be won through the parser: read the episodes before you trust these numbers",
                flush=True,
            )
        return found

    def _mirror(self) -> WandbMirror | None:
        tracker = self.experiment.tracker
        if tracker.wandb == "off":
            return None
        return WandbMirror(
            self.workdir,
            mode=tracker.wandb,
            project=tracker.project,
            name=f"{self.experiment.exp}-{self.workdir.name}",
            config=self.config_json,
        )


def _interrupted(reason: str) -> Interrupted:
    return Interrupted(f"stopped by {reason}; the same command goes on from here")


def _write_trajectories(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """One JSON line a trajectory: what a person needs to read it, turn by turn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(trajectory.to_json()) + "\n" for trajectory in trajectories)
    os.replace(partial, path)


@contextlib.contextmanager
def _only_process(workdir: Path) -> Iterator[None]:
    """Keeps a second process out of the run directory.

    Raises:
        ValueError: one is at work there.
    """
    with (workdir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"workdir {workdir}: another process is running in it; wait for it, or choose another --workdir"
            ) from None
        yield


def _other_configuration(workdir: Path, found: list[Difference]) -> str:
    named = "; ".join(f"{name} is {old!r} there and {new!r} here" for name, old, new in found)
    return (
        f"workdir {workdir} holds a run of another configuration: {named}; "
        "give the same settings to go on with it, or another --workdir to begin anew"
    )
