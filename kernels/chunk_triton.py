"""The delta rule by chunks in Triton: the stages in order, and their gradients.

The algebra of one chunk of C = 64 rows, per head; G is the inclusive cumulative log decay in the chunk, khat = rk k and qhat = rq q are
the normalised rows (rk, rq are row scalars, never applied to a stored tile), w is the write key (khat, or b * khat):

    L_ij = beta_i (khat_i . w_j) exp(G_i - G_j),  i > j ;  T = (I + L)^-1
    X = beta (V - exp(G) khat S) ;  R = T X
    O = scale [exp(G) qhat S + (qhat w^T * M) R],  M_ij = exp(G_i - G_j),  i >= j
    S' = exp(G_C) S + w^T (exp(G_C - G) R)

Stages and what they hand on (dtypes: x = input dtype; N = B * T tokens, M chunks, S sequences or spans):

    statistic.forward(x, layout, a_0)                      -> a_start [M, H, K] fp32, a [S, H, K] fp32
    solve.forward(x, layout, a_start | None)               -> Solved(t, w, rows): row QUERY_NORM is written by the scan
    scan.forward(x, solved, layout, spans, s_0 | None)     -> o [N, H, V] x, s [S, H, K, V] fp32; writes rows[QUERY_NORM]
    -- backward --
    scan.states(x, solved, layout, spans, s_0 | None)      -> h [M, H, K, V] x: the state each chunk meets
    scan_backward.backward(x, solved, layout, spans, do, ds | None, store=True)
                                                           -> dh [M, H, K, V] x: the gradient of the state each chunk hands on (dS'),
                                                              dx [N, H, V] x: dX, ds_0 [S, H, K, V] fp32
                                                              store=False: (None, None, ds_0), for the pass over spans
    gradients.backward(x, solved, layout, h, dh, dx, do)   -> dq, dk [N, H, K] x, dw [N, H, K] x | None, dv [N, H, V] x,
                                                              dbeta [N, H] beta's dtype, dg [N, H] decay's dtype | None
                                                              without a preconditioner dk is final (normalisation included), dw None;
                                                              with one dk is d khat (read role) and dw the gradient of the write key
    statistic.backward(x, solved, layout, a_start, dk, dw, da | None)
                                                           -> dk [N, H, K] x (normalisation included), dforget, dgain [N, H] their
                                                              dtypes, dcenter [H], da_0 [S, H, K] fp32

`x` is a `layout.Inputs`, `layout` a `layout.Layout`, `spans` an int32 table [S, 4] like `layout.sequences` (first chunk, chunks, first
token, tokens): scans run one program a row of it, and s_0, s, ds, ds_0 have a row for each of its rows. do [N, H, V] is contiguous, in
v's dtype. Every output is allocated by its launcher with torch.empty and written in full; no atomics.
"""
