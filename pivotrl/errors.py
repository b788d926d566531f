"""Errors that a user can act on."""


class UserError(Exception):
    """Bad input or configuration.

    The message names the file, line, key or turn, says what is wrong and what to do next. The CLI prints it
    without a traceback and exits with code 2.
    """
