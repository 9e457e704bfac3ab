"""Pictures of automatic differentiation: the graph at one step, the V of finite differences, what Jacobians cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import networkx
import numpy as np
import plotly.graph_objects as go

from gdlab.views import style

if TYPE_CHECKING:
    from gdlab.autodiff.measures import Costs, FiniteDifferences
    from gdlab.autodiff.recording import Node, Recording

QUESTION, MEMORY = "How does the gradient come about?", "bytes saved"
ROW_PX, MEMORY_PX, HEAD_PX = 92, 130, 110
"""Height of a row of nodes, of the part about memory, and of title and axis."""
MOST_NODES = 48
"""Nodes that a figure can show; more cannot be told apart."""
SIGNS = {"Add": "+", "Sub": "−", "Rsub": "−", "Mul": "×", "Div": "÷", "Pow": "^", "Neg": "−", "Reciprocal": "1/",
         "Mv": "@", "Mm": "@", "Dot": "·", "Sum": "Σ", "T": "T"}
WAITING, VALUE, GRADIENT, NOW = style.GRID, style.SKY, style.ORANGE, style.VERMILLION
"""Of a node: not reached yet, computed, differentiated, and the one of this step."""

Place = tuple[float, float]


def sign(node: Node) -> str:
    """Return what a node is called in the figure."""
    kind = node.name.partition("Backward")[0]
    return node.text if node.is_variable else SIGNS.get(kind, kind.lower())


def short(value: Any, digits: int = 4) -> str:
    """Return a value as it fits beside a node."""
    if value is None:
        return "none"
    if np.ndim(value) == 0:
        return f"{value + 0.0:.{digits}g}"
    if np.size(value) <= 2:
        return f"({', '.join(f'{one + 0.0:.3g}' for one in np.ravel(value))})"
    return f"[{'×'.join(map(str, np.shape(value)))}]"


def layout(recording: Recording) -> tuple[list[Place], dict[tuple[int, int], list[Place]]]:
    """Return each node's place, and the way of each edge (source, node) by way of the layers between."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(node.index for node in recording.nodes)
    edges = [(source, node.index) for node in recording.nodes for source in dict.fromkeys(node.inputs) if source >= 0]
    graph.add_edges_from(edges)
    depth = {one: at for at, layer in enumerate(networkx.topological_generations(graph)) for one in layer}
    for node in recording.nodes:
        if node.is_variable:  # right before it is first used
            depth[node.index] = min((depth[one] for one in graph.successors(node.index)), default=1) - 1
    ways = {}
    for source, target in edges:  # a long edge bends around what lies between
        steps: list[Any] = [source, *((source, target, at) for at in range(depth[source] + 1, depth[target])), target]
        depth.update({step: step[2] for step in steps[1:-1]})
        graph.remove_edge(source, target)
        networkx.add_path(graph, steps)
        ways[source, target] = steps
    heights: dict[Any, float] = {}
    layers: dict[int, list[Any]] = {}
    for at in range(max(depth.values(), default=-1) + 1):  # each as near as may be to what it is made from
        layer = [one for one, where in depth.items() if where == at]
        near = {one: np.mean([heights[before] for before in graph.predecessors(one)] or [0.0]) for one in layer}
        layers[at] = sorted(layer, key=near.__getitem__)
        heights.update({one: place - (len(layer) - 1) / 2 for place, one in enumerate(layers[at])})
    found = networkx.multipartite_layout(graph, subset_key=layers, scale=max(len(depth) - 1, 1) / 2)
    # Neighbouring layers, and neighbours in a layer, are to be 1 apart.
    unit = found[layers[1][0]][0] - found[layers[0][0]][0] if len(layers) > 1 else 1.0
    places = {one: (float(x / unit), -float(y / unit)) for one, (x, y) in found.items()}
    return ([places[node.index] for node in recording.nodes],
            {edge: [places[one] for one in steps] for edge, steps in ways.items()})


def graph(recording: Recording, step: int = 0, seed: str | None = None) -> go.Figure:
    """Draw torch's graph after `step` steps: in reverse mode or, with `seed`, in forward mode from that variable.

    Beside a node stands its value and, once it is known, the loss's derivative by it (∂; in forward mode its own by
    the seed); at an edge the local derivative. Below: the bytes that are saved for the backward pass after each step.
    """
    fig = style.figure(QUESTION, "", "", "Computed by torch, in float64.")
    if len(recording.nodes) > MOST_NODES:
        return style.empty(fig, f"This graph has {len(recording.nodes)} nodes: {MOST_NODES} can be drawn.")
    order, held = steps_of(recording, seed)
    step = max(0, min(step, len(order)))
    known, differentiated = reached(recording, step, seed)
    now = order[step - 1] if step else None
    places, ways = layout(recording)
    digits = 4 if max((x for x, _ in places), default=0.0) - min((x for x, _ in places), default=0.0) < 8 else 2
    active = {} if now is None else {(source, now.index): None for source in now.inputs if source >= 0}
    for lines, colour, width in ((ways, style.MUTED, 1), (active, NOW, 3)):
        points = [point for edge in lines for point in (*ways[edge], (None, None))]
        fig.add_scatter(x=[x for x, _ in points], y=[y for _, y in points], mode="lines", hoverinfo="skip",
                        line=dict(color=colour, width=width, shape="spline", smoothing=0.6), showlegend=False)
    colours, below, hover = [], [], []
    for node in recording.nodes:
        done = node.index in differentiated
        colours.append(NOW if node is now else GRADIENT if done else VALUE if node.index in known else WAITING)
        slope = node.tangents[seed] if seed else node.gradient
        below.append((short(node.value, digits) if node.index in known else "")
                     + (f"<br>∂ {short(slope, digits)}" if done else ""))
        hover.append(f"{node.text}<br>{node.name}<br>{node.value}<br>∂ {slope if done else '?'}")
    x, y = zip(*places, strict=True) if places else ((), ())
    fig.add_scatter(x=x, y=y, mode="markers+text", text=[sign(node) for node in recording.nodes], showlegend=False,
                    textfont=dict(size=11, color=style.INK), marker=dict(size=34, color=style.PAPER, opacity=1,
                    line=dict(color=colours, width=3)), hovertext=hover, hoverinfo="text")
    notes = [dict(x=a, y=b, text=text, yshift=-17, yanchor="top", showarrow=False, font=dict(size=11, color=style.INK))
             for (a, b), text in zip(places, below, strict=True) if text]
    notes += [dict(x=(a + c) / 2, y=(b + d) / 2, text=short(slope, digits), showarrow=False, bgcolor=style.PAPER,
                   font=dict(size=10, color=style.MUTED), borderpad=1)
              for node in recording.nodes if node.index in known for source, slope in zip(node.inputs, node.local,
              strict=True) if source >= 0 for (c, d), (a, b) in [ways[source, node.index][-2:]]]
    fig.add_scatter(x=list(range(len(held))), y=held, mode="lines", line=dict(shape="hv", color=style.BLUE, width=2),
                    xaxis="x2", yaxis="y2", showlegend=False, hovertemplate="%{y} bytes after step %{x}<extra></extra>")
    fig.add_scatter(x=[step], y=[held[step]], mode="markers", marker=dict(color=NOW, size=10), xaxis="x2", yaxis="y2",
                    showlegend=False, hoverinfo="skip")
    hidden = dict(visible=False, fixedrange=True)
    across = [min(x, default=0) - 0.5, max(x, default=0) + 0.5]
    tall = max((abs(one) for one in y), default=0.0) + 0.4
    height = ROW_PX * (2 * tall + 0.4)
    fig.update_layout(
        height=round(HEAD_PX + height + MEMORY_PX),
        annotations=notes, hovermode="closest", xaxis=hidden | dict(range=across), margin_l=56,
        yaxis=hidden | dict(domain=[1 - height / (height + MEMORY_PX), 1], range=[-tall - 0.4, tall]),
        xaxis2=dict(anchor="y2", title="step", range=[-0.3, len(held) - 0.7], nticks=8, zeroline=False),
        yaxis2=dict(anchor="x2", domain=[0, 0.7 * MEMORY_PX / (height + MEMORY_PX)], title=MEMORY, nticks=4,
                    range=[-0.5, 1.1 * max((*recording.held, 8))]))
    return style.describe(fig, f"{QUESTION} {sentence(recording, step, seed)} {held[step]} bytes are saved.")


def steps_of(recording: Recording, seed: str | None) -> tuple[list[Node], list[int]]:
    """Return the nodes in the order of the steps, and the bytes held after each, from step 0 on."""
    made = [node for node in recording.nodes if not node.is_variable]
    if seed:
        return made, [recording.forward_held] * (len(made) + 1)
    held = [0, *(recording.held[node.index] for node in made), *recording.freed]
    return [*made, *recording.steps], held


def reached(recording: Recording, step: int, seed: str | None) -> tuple[set[int], set[int]]:
    """Return the indices of the nodes whose value, and of those whose derivative is known after some steps."""
    variables = {node.index for node in recording.nodes if node.is_variable}
    made = len(recording.nodes) - len(variables)
    order = [node.index for node in steps_of(recording, seed)[0]]
    known = variables | set(order[:min(step, made)])
    return known, known if seed else set(order[made:step])


def sentence(recording: Recording, step: int, seed: str | None = None) -> str:
    """Say what the step that was just taken has done."""
    order, held = steps_of(recording, seed)
    made = sum(not node.is_variable for node in recording.nodes)
    if not step:
        return f"Not begun: {len(order)} steps" + (f", with {seed} seeded." if seed else f", {made} of them forward.")
    node = order[step - 1]
    inputs = [(recording.nodes[source], slope) for source, slope in zip(node.inputs, node.local, strict=True)
              if source >= 0]
    if seed:
        parts = [f"{short(slope)} × {short(one.tangents[seed])}" for one, slope in inputs]
        last = f" One pass a number: {size(recording)} in all." if step == len(order) else ""
        return (f"Forward {step} of {made}: {node.text} = {short(node.value)} changes by "
                f"{short(node.tangents[seed])} with {seed} ({' + '.join(parts)}).{last}")
    if step <= made:
        kept = ", ".join(f"{name} ({size} B)" for name, size in node.saved.items()) or "nothing"
        return f"Forward {step} of {made}: {node.text} = {short(node.value)}. {node.name} saves {kept}."
    freed = held[step - 1] - held[step]
    said = f"Back {step - made} of {len(order) - made}: the loss's derivative by {node.text} is {short(node.gradient)}."
    if inputs:
        said += " It goes on, times " + " and ".join(f"{short(slope)} to {one.text}" for one, slope in inputs) + "."
    last = f" One pass has given all {size(recording)} derivatives." if step == len(order) else ""
    return said + f" {freed} bytes are freed." * (freed > 0) + last


def size(recording: Recording) -> int:
    """Return how many numbers the variables have."""
    return sum(value.size for value in recording.values.values())


def v_curve(found: FiniteDifferences) -> go.Figure:
    """Draw the errors of finite differences over the step, with what theory says of either limb."""
    fig = style.figure("How good is a finite difference?", "step h", "error of the derivative",
                       f"{found.text}: measured in float64 (points), theory (lines).")
    floor = np.finfo(np.float64).tiny
    for error, name, colour, symbol in ((found.forward_error, "forward", style.ORANGE, "circle-open"),
                                        (found.central_error, "central", style.BLUE, "circle")):
        fig.add_scatter(x=found.steps, y=np.where(error > floor, error, np.nan), mode="markers", name=name,
                        marker=dict(color=colour, symbol=symbol, size=7))
    for limb, name, dash in ((found.truncation, "h² |f‴| / 6", "solid"), (found.rounding, "ε |f| / h", "dash")):
        fig.add_scatter(x=found.steps, y=limb, mode="lines", name=name,
                        line=dict(color=style.INK, dash=dash, width=1.5))
    low = min(float(found.central_error[found.central_error > floor].min(initial=1e-16)), 1e-10)
    fig.update_xaxes(**style.log_axis(found.steps), autorange="reversed")
    fig.update_yaxes(**style.log_axis([low, 1.0]), range=[np.log10(low) - 0.5, np.log10(found.forward_error.max()) + 1])
    best = found.steps[np.argmin(found.central_error)]
    return style.describe(fig, f"How good is a finite difference? The central one is best near h = {best:.1e}, with an "
                          f"error of {found.central_error.min():.1e}; theory says h = {found.best_step:.1e}.")


def cost_bars(found: Costs) -> go.Figure:
    """Draw the time of a whole Jacobian by both modes, over that of one evaluation of the function."""
    fig = style.figure("Which mode is cheaper?", "inputs → outputs", "time of the Jacobian / one evaluation",
                       "Measured: 1 thread, its own time, the least of several. At the bars: passes.")
    names = [f"{row['inputs']} → {row['outputs']}" for row in found.rows]
    for mode, colour in (("forward", style.ORANGE), ("reverse", style.BLUE)):
        fig.add_bar(x=names, y=[row[mode]["times"] for row in found.rows], name=mode, marker_color=colour,
                    text=[row[mode]["passes"] for row in found.rows], textposition="outside", cliponaxis=False)
    fig.update_yaxes(**style.log_axis([row[mode]["times"] for row in found.rows for mode in ("forward", "reverse")]))
    told = "; ".join(f"{name}: {row['forward']['passes']} and {row['reverse']['passes']} passes, "
                     f"{row['forward']['times']:.3g} and {row['reverse']['times']:.3g} evaluations"
                     for name, row in zip(names, found.rows, strict=True))
    return style.describe(fig, f"Which mode is cheaper? Forward and reverse mode take, for {told}.")
