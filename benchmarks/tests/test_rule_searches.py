"""The search for the largest set of workspace rules."""

from rule_searches import check_recovery


def test_every_rule_of_the_largest_set_is_recovered():
    check_recovery("gpumemnet_2024")
