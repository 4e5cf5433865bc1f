"""Pipeline parallelism: a deep model in stages on ranks, all of them busy.

``schedule`` holds what a rank does and when, as data.
"""
