"""TBEM's case study on the virtual GPU: `python -m benchmarks.study.vgg_depth`.

The memory of VGGs with equal layers against their depth. Polynomials of the memory, and of its gap to the static
estimate, are fitted to the shallower networks and tested on the deeper ones. All figures are simulated.
"""

from functools import partial
from pathlib import Path

from benchmarks.page import publish, study_parser
from benchmarks.small_pictures import light_picture
from benchmarks.study.depth_study import DepthStudy, depth_study
from benchmarks.study.style import BLUE, GREY, ORANGE, markdown
from vramcast.dataset_builder.backends.virtual import VirtualBackend
from vramcast.device.profiles import DEFAULT_DEVICE, load_profile
from vramcast.models.drawing import quiet
from vramcast.virtual_gpu.allocator.sizes import MIB

NAMES = {"gap": "static estimate + polynomial of the gap", "gv": "polynomial of the memory (GV)"}
COLOURS = {"gap": BLUE, "gv": ORANGE}
STYLES = {1: ":", 2: "--", 3: "-"}


def fits_table(study: DepthStudy) -> str:
    """Return a table with the mean relative errors of each polynomial, inside and beyond the fitted range."""
    lines = [
        [NAMES[fit.target], str(fit.degree), f"{fit.fitted_error:.2%}", f"{fit.extrapolation_error:.2%}"]
        for fit in study.fits
    ]
    depths = [point.depth for point in study.points]
    last = max(point.depth for point in study.points if point.fitted)
    head = ["estimate", "degree", f"error, depth {depths[0]} to {last}", f"depth {last + 1} to {depths[-1]}"]
    return markdown(head, lines)


def draw(study: DepthStudy, path: Path) -> None:
    """Draw simulated memory with the fitted polynomials, and the gap alone."""
    depths = [point.depth for point in study.points]
    last = max(point.depth for point in study.points if point.fitted)
    with light_picture(path, 10.5, 4.2) as figure:
        whole, gap = figure.subplots(1, 2)
        for fit in study.fits:
            predicted = [value / MIB for value in fit.predicted_bytes]
            label = f"{NAMES[fit.target]}, degree {fit.degree}"
            whole.plot(
                depths, predicted, color=COLOURS[fit.target], linestyle=STYLES[fit.degree], linewidth=1.2, label=label
            )
        whole.plot(
            depths, [point.measured_bytes / MIB for point in study.points], "ko", markersize=3, label="simulated"
        )
        gap.plot(depths, [point.gap_bytes / MIB for point in study.points], "o", color=GREY, markersize=4)
        for axes, title in ((whole, "Device memory"), (gap, "Gap: simulated less static estimate")):
            axes.axvspan(last + 0.5, depths[-1] + 0.5, color="0.94", zorder=0)
            axes.set(xlabel="layers with weights", ylabel="MiB", title=title)
            axes.title.set_fontsize(10)
            quiet(axes)
        whole.legend(fontsize=7, frameon=False)
        figure.suptitle("VGGs of equal layers, batch 32, simulated on an A100; grey: not fitted to", fontsize=10)


def main() -> None:
    arguments = study_parser(__doc__, measured=False).parse_args()
    study = depth_study(VirtualBackend(load_profile(DEFAULT_DEVICE)))
    text = fits_table(study)
    publish(arguments, "study.vgg_depth", text, partial(draw, study))


if __name__ == "__main__":
    main()
