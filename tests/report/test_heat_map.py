"""The heat map of a partition in a terminal."""


def test_clients_that_are_held_out_are_marked(command):
    said = command("partition", "--clients", 8, "--holdout-clients", 3, "--partition", "iid")
    marked = [line.split()[0] for line in said.out.splitlines() if line[:6].strip().isdigit() and line[21:22] == "*"]
    assert marked == ["5", "6", "7"]
