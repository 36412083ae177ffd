from fedobp.progress import report, shown_by


def test_progress_is_shown_by_the_innermost_listener():
    seen = []
    report("nobody listens", 0.0)
    with shown_by(lambda what, share: seen.append(("outer", what, share))):
        report("one", 0.5)
        with shown_by(lambda what, share: seen.append(("inner", what, share))):
            report("two", 0.25)
        report("three", 1.0)
    report("nobody listens", 1.0)
    assert seen == [("outer", "one", 0.5), ("inner", "two", 0.25), ("outer", "three", 1.0)]
