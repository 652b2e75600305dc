"""Slime: where the plugin enters it."""

from miles_sc.hosts.seams import Host

HOST = Host(package="slime", landmark="slime.utils.arguments", entry="slime.utils.arguments", seams=())
