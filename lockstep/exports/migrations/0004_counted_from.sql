-- The fence at which a chunk's attempts began to count: a retry starts them anew, the fence never does.
ALTER TABLE job_chunk ADD COLUMN counted_from bigint NOT NULL DEFAULT 0;
