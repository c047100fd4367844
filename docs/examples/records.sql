-- What became of a date
SELECT status, reason, COUNT(*) AS records, MAX(settled_time) AS latest
FROM records
WHERE reference_date = '2026-11-02'
GROUP BY status, reason;

-- Publish refused ones again, when the job has completed and the cause is mended: clear the task afterwards
UPDATE records
SET status = 'PENDING', reason = NULL, settled_time = NULL
WHERE reference_date = '2026-11-02' AND status = 'REFUSED';
