"""Commands, run in this process: their exit status, and mistakes that are told in one line."""

from mcftensor.__main__ import main


def exit_status(command, arguments):
    """The exit status of a command, whether it returns one or leaves with it."""
    try:
        return command(arguments)
    except SystemExit as leaving:
        return leaving.code


def assert_one_line(stderr: str, program: str, complaint: str = "") -> None:
    assert stderr.startswith(f"{program}: ")
    assert complaint in stderr
    assert len(stderr.splitlines()) == stderr.count("\n") == 1


def answered(capsys, name: str, *arguments):
    """The exit status of `python -m mcftensor name`, what it prints, and what it complains of."""
    status = exit_status(main, [name, *map(str, arguments)])
    out, err = capsys.readouterr()
    if status == 2:
        assert not out
        assert_one_line(err, f"python -m mcftensor {name}")
    else:
        assert not err
    return status, out, err
