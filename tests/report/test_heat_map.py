def test_the_terminal_marks_who_is_held_out(command):
    said = command("partition", "--clients", 8, "--holdout-clients", 3, "--partition", "iid")
    marked = [line.split()[0] for line in said.out.splitlines() if line[:6].strip().isdigit() and line[21:22] == "*"]
    assert marked == ["5", "6", "7"]
