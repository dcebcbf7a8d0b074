"""Where endpoints come from: the configuration, a watched file, DNS; merged into one set.

Each source only knows how to look and how long to pause; :mod:`extproc.discovery.merge` runs them.
"""
