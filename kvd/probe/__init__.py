"""What the host offers. Each module asks the kernel about one thing and returns frozen values; nothing is changed.

May be used by the server (at start) and by kvctl (doctor). Every function takes the root of the file tree it reads as
an argument, so that tests give it another machine. Absent files are answers, not errors.
"""
