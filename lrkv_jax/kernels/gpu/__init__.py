"""Split-KV decode on a Hopper GPU: one Pallas (Mosaic GPU) kernel under all three decode kernels.

A cooperative thread array (CTA) takes one segment of a sequence (`schedule`) for one unit of query
heads. One warpgroup copies tiles of 64 tokens from the cache into rings of 8 KB slots, 64 x 64
16-bit values each; one or two others consume them, each for `heads` separate query heads, and
share the tiles that all heads read. Products are transposed: tokens are the 64 rows, (head,
query) pairs the N columns, so that few heads waste no tensor-core work.

Per tile: logits [64, N] = Σ blocks · queries, times the inverse norms; an online softmax over the
rows; sums [64, N] += blocksᵀ · weights for every 64-wide block of values. In LRKV's mode `full` a
head's residual key tile is rebuilt on chip, U = rk_h · B_h with tokens as rows, rotated in
registers by its tokens' angles and reduced against each query; it is never in memory.

A page is a tile: with a page table `produce` copies the same box from a pool of pages. 8-bit caches
would change the slots' dtype and scale logits where the inverse norms do.

B batch  T queries  S cache slots  H heads  G key/value heads  K head width  R latent width
Z workers  N columns of a warpgroup  U units of heads  Q warpgroups per CTA  J = 64 padded pairs
"""
