"""The table of TBEM's case study."""

from benchmarks.study.depth_study import DepthFit, DepthPoint, DepthStudy
from benchmarks.study.vgg_depth import fits_table


def test_a_line_for_each_polynomial_with_both_errors():
    points = tuple(DepthPoint(depth, depth, depth, fitted=depth < 10) for depth in range(8, 12))
    fits = (DepthFit("gap", 1, (8.0, 9.0, 10.0, 11.0), 0.01, 0.25), DepthFit("gv", 2, (8.0, 9.0, 10.0, 11.0), 0.0, 0.5))
    head, _, first, second = fits_table(DepthStudy(points, fits)).splitlines()
    assert "depth 8 to 9" in head
    assert "depth 10 to 11" in head
    assert first.startswith("| static estimate + polynomial of the gap | 1 | 1.00% | 25.00% |")
    assert second.endswith("| 2 | 0.00% | 50.00% |")
