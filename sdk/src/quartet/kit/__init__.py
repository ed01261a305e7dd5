"""The service kit: what all four services share on the wire, and nothing about their work.

Import the modules by name (`quartet.kit.server`, `.channel`, `.call`, `.stream`, `.health`, `.logs`,
`.metrics`, `.memory`).
"""
