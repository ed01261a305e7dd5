"""POST /v1/responses, translated: its requests into those of chat, chat's answers into its own.

1. Nothing is sampled, refused, limited or ended here: that is the chat path's. The prompt is, to the token,
   that of the chat request with the same conversation (`items`, `body`).
2. No response is kept: each request brings its whole conversation (`kept`).
3. The answer and the last event of its stream say the same (`output`, `events`).
"""
