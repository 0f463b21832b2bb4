from paceline.monitor.user_code import find_user_line


def test_an_error_whose_message_is_a_traceback_tells_its_line() -> None:
    message = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "/venv/lib/python3.11/site-packages/torch/utils/data/fetch.py", line 52, in fetch\n'
        '  File "/home/me/mine.py", line 7, in __getitem__\nValueError: sample 20 is broken\n'
    )
    assert find_user_line(ValueError(message)) == "/home/me/mine.py:7"


def test_an_error_that_came_through_nobodys_code_has_no_line() -> None:
    assert find_user_line(ValueError("no")) == ""
