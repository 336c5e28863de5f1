"""The command line in this process."""


def check_error(result, *parts, program="arpg"):
    """Exit code 2 and one line that holds all parts."""
    code, _, err = result
    assert code == 2, err
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    assert lines[0].startswith(f"{program}: ")
    for part in parts:
        assert part in lines[0]
