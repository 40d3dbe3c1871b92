"""Prints a `Plan` as tables on a terminal."""

from rich import box
from rich.console import Console
from rich.table import Table

from levanter_infer.plan.figures import Figures
from levanter_infer.plan.launches import StepLaunches
from levanter_infer.plan.plan import Plan
from levanter_infer.plan.step_budget import StepBudget
from levanter_infer.runtime.memory import gib


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    target, mesh = plan.spec.machine, plan.spec.mesh_config
    used = mesh.num_devices
    console.print(
        f"[bold]{target.name}[/]: {target.num_chips} × {target.chip.kind}, of which the mesh takes {used} ({mesh})"
    )
    if used < target.num_chips:
        console.print(f"  {target.num_chips - used} would stand idle: raise mesh.data or mesh.model")
    if plan.figures is not None:
        console.print(_memory_table(plan, plan.figures))
        console.print(_pages_table(plan.figures))
        for title, lines in _sections(plan, plan.figures):
            console.print(f"[bold]{title}[/]")
            for line in lines:
                console.print(f"  {line}", highlight=False)
    for line in verdict(plan):
        console.print(line, highlight=False)


def verdict(plan: Plan) -> list[str]:
    """Lines that say whether it fits, and with which changes it would."""
    how = "as compiled" if plan.programs else "by shapes alone; --no-compile leaves out programs and their workspace"
    if plan.why_not is None:
        return [f"[bold green]fits[/] ({how})"]
    lines = [f"[bold red]does not fit[/]: {plan.why_not}"]
    if not plan.changes:
        return [*lines, "no change of one thing was found with which it would"]
    for i, change in enumerate(plan.changes):
        state = "compiled, fits" if i == 0 and plan.checked else "fits by shapes"
        lines.append(f"{'smallest change' if i == 0 else '  or           '}  {change}  ({state})")
    return lines


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _memory_table(plan: Plan, figures: Figures) -> Table:
    table = _table("memory of a device", "what", "size", "share")

    def row(name: str, size: int) -> None:
        table.add_row(name, gib(size), f"{size / figures.memory_bytes:.1%}")

    row("weights", figures.weights_bytes)
    row("pages of keys and values" + ", states" * (figures.states is not None), figures.pool_bytes)
    row("tables", figures.tables_bytes)
    row("uploads", figures.upload_bytes)
    if plan.programs:
        row("programs: workspace, code, padding", plan.extra_bytes)
    else:
        table.add_row("programs: workspace, code, padding", "not compiled", "")
    row("free", figures.memory_bytes - figures.known_bytes - plan.extra_bytes)
    row("there", figures.memory_bytes)
    return table


def _pages_table(figures: Figures) -> Table:
    table = _table(f"pages of each of {figures.num_ranks} data-parallel ranks", "what", "")
    table.add_row("pages", f"{figures.num_pages} of {figures.page_size} tokens, {gib(figures.page_bytes)} each")
    for each in figures.windows:
        name = f"pages of layers with a window of {each.window}"
        table.add_row(name, f"{each.num_pages}, {gib(each.page_bytes)} each")
    if figures.states is not None:
        states = figures.states
        found = (
            f"{states.num_slots} of slots, {states.num_snapshots} for prefix caching, {gib(states.state_bytes)} each"
        )
        table.add_row("states of fixed size", found)
    table.add_row("tokens", str(figures.num_pages * figures.page_size))
    table.add_row("sequences of engine.max_seq_len that fit", f"{figures.full_seqs} of {figures.max_seq_len} tokens")
    table.add_row("engine.max_seqs", str(figures.max_seqs))
    table.add_row("attention, matmuls", f"{figures.attention}, {figures.matmul}")
    table.add_row("tokens of a step", " ".join(map(str, figures.buckets)))
    for name, tile in figures.tiles.items():
        sizes = ", ".join(f"{key} {value}" for key, value in tile.items())
        table.add_row(f"tile of {name}", sizes)
    return table


def _sections(plan: Plan, figures: Figures):
    if plan.programs:
        yield "programs", [_program_line(program) for program in plan.programs]
        if plan.programs[0].error is None:
            yield "collectives (compiled)", _collective_lines(plan, figures)
            copies = [f"{gib(size)} {op} {kind}, {n} times" for size, op, kind, n in plan.programs[0].copies]
            yield "copies of 1 MiB and more in the round (compiled)", copies or ["none"]
            if plan.programs[0].budgets:
                title = "cycles of a step (modelled; collectives and waits for HBM are not among them)"
                yield title, [line for budget in plan.programs[0].budgets for line in budget_lines(budget)]
            elif plan.programs[0].launches:
                yield "launches of a step (compiled)", [launch_line(each) for each in plan.programs[0].launches]
            elif plan.programs[0].no_budget is not None:
                yield "parts of a step", [f"not known: {plan.programs[0].no_budget}"]
    speed = plan.speed
    assert speed is not None
    step = speed.decode
    yield (
        "speed (modelled, a bound)",
        [
            f"{speed.sequences} sequences at once per data-parallel rank; pages suffice for {speed.seqs_by_pages}",
            f"a step of decoding {_ms(step.total_s)}: weights {_ms(step.weights_s)}, keys and values "
            f"{_ms(step.kv_s)}, arithmetic {_ms(step.compute_s)} meanwhile, collectives {_ms(step.collectives_s)}",
            f"a prompt {_ms(speed.prompt_s)}",
            f"[bold]{speed.tokens_per_s:,.0f}[/] generated tokens/s of all devices, prompts included; "
            f"{speed.decode_tokens_per_s:,.0f} while only decoding",
            f"what binds: {_binding(speed.gains)}",
        ],
    )
    yield "assuming", list(speed.assumptions)


def _binding(gains: dict[str, float]) -> str:
    """The resource whose doubling would speed it up most, and the gains of the others."""
    name, most = next(iter(gains.items()))
    rest = ", ".join(f"{other} {gain - 1:+.0%}" for other, gain in gains.items() if other != name)
    return f"{name}: twice as much of it would give {most - 1:+.0%}; of {rest}"


def _program_line(program) -> str:
    if program.error is not None:
        return f"{program.name}: refused: {' '.join(program.error.split())[:500]}"
    return (
        f"{program.name}: traced in {program.trace_s:.1f} s, compiled in {program.compile_s:.1f} s; arguments "
        f"{gib(program.argument_bytes)}, workspace {gib(program.workspace_bytes)}, code {gib(program.code_bytes)}"
    )


def budget_lines(budget: StepBudget) -> list[str]:
    """The parts of a step, each with its share."""
    kind = "decode and prompts" if budget.has_chunks else "decode"
    parts = (f"{name} {count / budget.total:.1%}" for name, count in budget.cycles.items() if count)
    lines = [f"{kind}, {budget.bucket} tokens, {budget.sampled}: {budget.total:,}: {', '.join(parts)}"]
    if budget.kernels:
        kernels = ", ".join(f"{name} {calls:,}" for name, calls in budget.kernels.items())
        lines.append(f"  not among them, kernels whose work depends on data, calls: {kernels}")
    if budget.has_chunks or budget.sampled != "greedy":
        return lines
    lines.append(f"  copied between HBM and VMEM outside of layers: {budget.copied_bytes / 2**20:.1f} MiB")
    expected = ", ".join(f"{name} {count:,}" for name, count in budget.expected.items())
    lines.append(f"  as the compiler expected, since no schedule tells them: {expected or 'none'}")
    needed = ", ".join(f"{name} {count:,}" for name, count in budget.when_needed.items())
    lines.append(
        f"  not among them, loops that run when there is something to do, one trip of each: {needed or 'none'}"
    )
    if budget.once:
        once = ", ".join(f"{name} {count:,}" for name, count in budget.once.items())
        lines.append(f"  among them once, loops whose trips depend on the prompts: {once}")
    return lines


def launch_line(launches: StepLaunches) -> str:
    """Kernels of a step by its parts, and what the host does."""
    kind = "decode and prompts" if launches.has_chunks else "decode"
    parts = ", ".join(f"{name} {count:,}" for name, count in launches.kernels.items() if count)
    return (
        f"{kind}, {launches.bucket} tokens, {launches.sampled}: {launches.total:,} kernels and copies ({parts}; "
        f"{launches.layer_kernels} a layer); the host launches {launches.host_launches:,} and waits for "
        f"{launches.host_conditions:,} conditions; graphs decide {launches.graph_conditions:,}"
    )


def _collective_lines(plan: Plan, figures: Figures) -> list[str]:
    lines = []
    if figures.block_tokens is not None:
        found = [_collective(each) for each in plan.programs[0].collectives]
        return found or ["none"]
    bodies = figures.model["layer_bodies"]
    per_layer = f"the {bodies} bodies of the loops over layers" if bodies > 1 else "each layer"
    for bucket in figures.buckets:
        sent = plan.sent_in(bucket)
        for name, group in ((per_layer, sent.per_layer), ("each step", sent.per_step)):
            lines += [f"{bucket} tokens, {name}: {_collective(each)}" for each in group]
    blocks = plan.sent_in(figures.buckets[0]).per_block
    lines += [f"each {figures.sampled_rows} rows sampled: {_collective(each)}" for each in blocks]
    return lines or ["none"]


def _collective(each) -> str:
    return f"{each.count} × {each.operation} {each.kind} over {each.parts} devices, {gib(each.num_bytes)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
