"""HTTP and WebSocket to a port in a sandbox, without publishing it.

dial.py        a TCP connection inside the network namespace of a sandbox
headers.py     what of a request goes in, what of an answer comes out
forward.py     one HTTP exchange, streamed both ways
websocket.py   one WebSocket, frame by frame

What must hold: whatever answers in there is hostile. Nothing of it is believed before a kept
parser (h11, websockets) has read it; it cannot make the edge connect anywhere else (redirects are
passed on, never followed), write more than its own answer, or hold on to the edge for longer than
the stated times. Nothing of the edge's own (its token) goes in.
"""
