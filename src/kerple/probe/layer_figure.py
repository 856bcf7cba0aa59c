"""`layer_figure`: pictures of the rotation and the visible keys of each kind of layer."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from kerple.probe.layer_checks import Verdict

MOST = 6  # largest number of kinds of layers that are drawn
SMALLEST = 1e-9  # errors below this number of radians, and 0, are drawn here


def layer_figure(groups: Sequence[tuple[str, Verdict]]) -> Figure | None:
    """Return a figure with three panels and one colour for each kind of layer; None if no layer was measured.

    The panels show the measured over the configured angle by pair of channels, the number of keys that each query sees,
    and the largest error of an angle by position.

    Args:
        groups: The indices of the layers of each kind, such as ``0 to 4``, and the verdict about one of them.
    """
    kinds = [(numbers, verdict) for numbers, verdict in groups if verdict.rotation is not None or verdict.seen]
    if not kinds:
        return None
    figure = Figure((12, 3.8), layout="constrained")
    ratio, keys, error = figure.subplots(1, 3)
    for i, (numbers, first) in enumerate(kinds[:MOST]):
        color, label = f"C{i}", f"layer {numbers}"
        if (rotation := first.rotation) is not None:
            turning = rotation.expected > 0
            if turning.any():
                ratio.plot((rotation.radians / rotation.expected)[turning], ".-", color=color, lw=0.8, label=label)
            error.plot(rotation.positions + 1, rotation.errors.clamp(min=SMALLEST), ".-", color=color, lw=0.8)
        if first.seen:
            measured, configured = zip(*first.seen, strict=True)
            keys.plot(configured, color=color, lw=1)
            keys.plot(measured, ".", color=color, ms=3, label=label)
    ratio.axhline(1, color="#555", lw=0.8, zorder=0)
    ratio.set(xlabel="pair of channels", ylabel="measured / configured angle")
    low, high = ratio.get_ylim()
    ratio.set_ylim(min(low, 0.998), max(high, 1.002))  # rounding does not fill the panel
    ratio.ticklabel_format(axis="y", useOffset=False)
    keys.set(xlabel="query", ylabel="visible keys")
    error.set(xlabel="position + 1", ylabel="largest error of an angle (radians)", xscale="log", yscale="log")
    handles, labels = max((axes.get_legend_handles_labels() for axes in (ratio, keys)), key=lambda found: len(found[1]))
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    if len(kinds) > MOST:
        figure.suptitle(f"{MOST} of {len(kinds)} kinds of layers", fontsize="medium")
    return figure
