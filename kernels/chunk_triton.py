"""The delta rule by chunks in Triton: the stages in order, and their gradients.

The algebra of one chunk of C rows (`layout.chunk_rows`), per head; G is the inclusive cumulative log decay in the chunk, khat = rk k and
qhat = rq q the normalised rows (rk, rq are row scalars, never applied to a stored tile), w the write key (khat, or b * khat), S the state
that the chunk meets and B = diag(beta):

    M_ij = exp(G_i - G_j), i >= j ;  L = khat w^T * M, strictly below the diagonal ;  N = (I + L B)^-1 L        (solve)
    E = V - exp(G) khat S ;  U = E - N (B E) = (I + L B)^-1 E                                                   the corrected errors
    O = scale exp(G) qhat S + QW (B U), QW = scale (qhat w^T * M) ;  S' = exp(G_C) S + w^T (exp(G_C - G) B U)                (scan)

So B U are the values written, R in docs/paper.md, section 2; its T is (I + B L)^-1 B = (I - B N) B. N rather than T is stored: the
identity then enters exactly, in fp32, and the gradient of beta needs no division.

Stages and what they hand on (x: input dtype; N tokens = B * T, M chunks, S sequences or spans):

    statistic.forward(x, layout, a_0)                         -> a_start [M, H, K] fp32, a [S, H, K] fp32
    solve.forward(x, layout, a_start | None)                  -> Solved(t, qw, w, rows, whole): -N, QW, write keys, row scalars
    scan.forward(x, solved, layout, spans, s_0 | None)        -> o [N, H, V] x, s [S, H, K, V] fp32
    -- backward --
    scan.states(x, solved, layout, spans, s_0 | None)         -> h [M, H, V, K] x: S^T of each chunk, u [N, H, V] x: U
    scan_backward.backward(x, solved, layout, spans, do, ds)  -> dh, dx, ds_0
    gradients.backward(x, solved, layout, a_start, h, u, dh, dx, do) -> Gradients
    statistic_backward.backward(x, solved, layout, a_start, gradients, da) -> dforget, dgain, dcenter, da_0
"""
